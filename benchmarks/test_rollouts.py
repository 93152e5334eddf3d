"""Generation, weight updates, and the rest of a training step, by engine.

The trainer logs these numbers. Each engine runs in its own process, because it changes threads and
random numbers.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import text
from benchmarks.child import VLLM, ask
from benchmarks.conftest import DEVICE, Session, check_row
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.training import SIZES, TrainingConfig, build, make_model, make_tokenizer, sized
from tests.support.launch import end, free_port

_WARM_UP = 2  # steps; the first one sends weights that aren't an update
_STEPS = 3
_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = VLLM | ({"TORCHDYNAMO_DISABLE": "1"} if DEVICE == "cpu" else {})
_BLOCK = 32  # tokens; vLLM on a CPU needs a multiple of it
_MEMORY_SHARE = 0.1 if DEVICE == "cpu" else 0.3  # vLLM's, of the device's memory
_PROFILE = "profiling/"
_SERVE = "from grpo_trainer.cli import main; main()"
# names of phases in the table; other phases keep their names
_PHASES = {"sync": "update", "score": "rewards", "old": "old policy", "ref": "reference"}
_GPU = [sized(name, DEVICE) for name in ("middle-gpu", "large-gpu")]
CASES = {
    "tiny": [sized("tiny", DEVICE)],
    "quick": [sized("quick", DEVICE)],
    "cpu": [SIZES[name] for name in ("quick", "middle", "large")],
    "gpu": _GPU,
    "gpu-full": _GPU,
}


def _longest(config: TrainingConfig) -> int:
    """Return the longest sequence of an engine, in tokens."""
    tokens = config.prompt_tokens + config.completion_tokens
    return tokens + -tokens % _BLOCK


def _vllm_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return the arguments of the engine, the same for a colocated one and a server."""
    settings: dict[str, Any] = {"max_num_seqs": config.sequences}
    if DEVICE == "cpu":  # small and quick to start, with enough bytes of keys and values
        small = {"block_size": _BLOCK, "kv_cache_memory_bytes": 256 << 20}
        settings |= {"enforce_eager": True, **small}
    return settings


def _engines(config: TrainingConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the note of each engine, and its fields of GRPOConfig."""
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 240.0}
    return {
        "transformers": ("`generate` of transformers with the policy's own weights", {}),
        "vllm-colocate": (
            "vLLM inside the training process",
            {
                "use_vllm": True,
                "vllm_max_model_length": _longest(config),
                "vllm_gpu_memory_utilization": _MEMORY_SHARE,
                "vllm_engine_kwargs": _vllm_arguments(config),
            },
        ),
        "vllm-server": ("a vLLM server on the same machine", server),
        "vllm-server-overlap": (
            "the same with generation_batches_ahead=1, where only the wait counts",
            {**server, "generation_batches_ahead": 1},
        ),
    }


def _is_sent(engine: str) -> bool:
    """Return whether an engine has its own weights, which it receives."""
    return engine.startswith("vllm")


def notes(case: TrainingConfig) -> dict[str, str]:
    """Return every engine; the middle size has only engines that receive weights."""
    notes = {name: note for name, (note, _) in _engines(case).items()}
    return {n: x for n, x in notes.items() if _is_sent(n) or not case.name.startswith("middle")}


def measure(case: TrainingConfig, rows: Sequence[Row], session: Session) -> None:
    """Measure engines one after another, because each uses the whole machine."""
    for row in rows:
        if _is_sent(row.provider) and importlib.util.find_spec("vllm") is None:
            row.leave_out("absent", "vLLM is not installed here; `make bench-vllm` installs it")
        if row.runs:
            with attempt(row):
                own = _ENVIRONMENT if _is_sent(row.provider) else {}
                found = ask(_run, row.provider, case, timeout=_LONGEST, **own)
                row.seconds, row.info, row.cells = found


def about(case: TrainingConfig, device: str) -> str:
    return (
        f"{case.sequences} completions of up to {case.completion_tokens} tokens after "
        f"{case.prompt_tokens}"
    )


def _run(name: str, config: TrainingConfig) -> tuple[list[float], dict[str, Any], dict[str, str]]:
    """Return a row's seconds, info and cells: what the trainer logged of its steps."""
    from grpo_trainer.engines import policy_weights

    # completions may end early
    settings = _engines(config)[name][1] | {"generation_kwargs": None, "write_report": False}
    with _served(config) if "server" in name else nullcontext() as port:
        settings |= {"vllm_server_port": port} if port else {}
        trainer: Any = build("grpo_trainer", config, DEVICE, _WARM_UP + _STEPS, **settings)
        trainer.train()
        trainer.rollouts.close()
    rows = [row for row in trainer.state.log_history if "loss" in row][-_STEPS:]
    seconds = [row["step_time"] for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(_PROFILE))
    phases = {name.removeprefix(_PROFILE): [row.get(name, 0.0) for row in rows] for name in names}
    info, cells = {}, {}
    if "overlap" not in name:  # the wait doesn't show the speed of generation
        tokens = (config.sequences * row["completions/mean_length"] for row in rows)
        info["tokens_per_second"] = median(map(float.__truediv__, tokens, phases["generate"]))
        cells["generated, tokens/s"] = text.digits(info["tokens_per_second"])
    if _is_sent(name):
        size = sum(x.numel() * x.element_size() for _, x in policy_weights(trainer.model))
        update = info["update_seconds"] = median(phases["sync"])
        cells["update"] = text.duration(update)
        cells["update, GiB/s"] = text.digits(size / 2**30 / update)
    else:
        phases.pop("sync", None)
    for phase, found in phases.items():
        info[f"{phase}_share"] = sum(found) / sum(seconds)
        cells[f"{_PHASES.get(phase, phase)}, %"] = text.digits(100 * info[f"{phase}_share"], 2)
    return seconds, info, cells


@contextmanager
def _served(config: TrainingConfig) -> Iterator[int]:
    """Yield the port of ``grpo-train serve`` with the model of ``config``."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(config).save_pretrained(folder)
        make_tokenizer(config).save_pretrained(folder)
        options: dict[str, Any] = {
            "model": folder,
            "port": free_port(),
            "dtype": "float32" if DEVICE == "cpu" else "bfloat16",
            "max_model_len": _longest(config),
            "gpu_memory_utilization": _MEMORY_SHARE,
            **_vllm_arguments(config),
        }
        words = [sys.executable, "-c", _SERVE, "serve"]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        log = Path(folder, "server.txt")
        with log.open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
        try:
            yield options["port"]
        except Exception as error:
            error.add_note(f"the server said: {log.read_text()[-3000:]}")
            raise
        finally:
            end(process)


test_rollouts = check_row
