"""Builds the task and the policy, trains by ``grpo-train``, compares the heads, reports."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from pyarrow import parquet
from transformers.utils.logging import disable_progress_bar

from grpo_kernels import LossConfig
from grpo_kernels.tools import OneLineParser, count
from grpo_trainer import cli
from grpo_trainer.demo import compare
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import DIGITS, write_dataset
from grpo_trainer.monitor import History, RunRecord, load_run
from grpo_trainer.report import REPORT_NAME, Curves, curves_of, prompt_samples

STEPS = 200
CONFIG = Path(__file__).with_name("run.yaml")

# what a run with vLLM adds
_VLLM = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_engine_kwargs": json.dumps(
        {
            "enforce_eager": True,
            "max_num_seqs": 512,
            "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20,
        }
    ),
}
_COMPARED = 512  # completions with which the loss is compared
_QUANTITIES = {"seconds": "time", "peak_bytes": "memory", "error": "gradient error"}
_PANELS = {
    "mean reward": "reward",
    "entropy (nats)": "entropy",
    "completion length (tokens)": "completions/mean_length",
}


def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m grpo_trainer.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Folder for results.")
    parser.add_argument("--steps", type=count, default=STEPS, help="Optimizer steps.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights, data split and sampling.")
    engines = ("transformers", "vllm")
    parser.add_argument("--rollout", choices=engines, default="transformers", help="Engine.")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    # the policy is too small to share: more threads would mostly wait for one another
    torch.set_num_threads(1)
    out, steps, trained = options.out, options.steps, options.out / "trained"
    out.mkdir(parents=True, exist_ok=True)
    train_file, eval_file = write_dataset(out, options.seed)
    with_vllm = options.rollout == "vllm"
    # of files that are read and written in no time
    disable_progress_bar()
    disable_progress_bars()
    # on a CPU, vLLM's heads have a multiple of 32 channels
    policy = write_policy(out / "model", options.seed, heads=2 if with_vllm else 4)
    print(
        f"A {policy.num_parameters():,}-parameter transformer learns to write {DIGITS} digits "
        "backwards, from its own samples.",
        flush=True,
    )
    run = {
        "config": CONFIG,
        "model_name_or_path": out / "model",
        "dataset_name": train_file,
        "eval_dataset_name": eval_file,
        "output_dir": trained,
        "run_name": f"reversing {DIGITS} digits",
        "max_completion_length": DIGITS + 1,
        "max_steps": steps,
        "logging_steps": min(5, steps),
        "eval_steps": steps,
        "seed": options.seed,
    } | (_VLLM if with_vllm else {})
    cli.main([word for name, value in run.items() for word in (f"--{name}", str(value))])
    record = load_run(trained)
    print("comparing our loss with those of other libraries: up to two minutes", flush=True)
    summary = _summary(record, out / "model") | {"seconds": time.perf_counter() - start}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _write_rows(out / "metrics.csv", [row for row in record.history if "reward" in row])
    print(f"\n{_told(summary)}\n")
    if missing := set(compare.HEADS) - {row["name"] for row in summary["heads"]}:
        print(f"not installed, so not compared: {', '.join(sorted(missing))}\n")
    written = ["summary.json", "metrics.csv"]
    if find_spec("matplotlib"):
        _plot_curves(out / "curves.png", curves_of(record.history))
        written.append("curves.png")
    else:
        print("matplotlib is not installed, so there is no curves.png\n")
    print(f"{summary['seconds']:.0f} seconds; {', '.join(written)}: {out}")
    print(f"open the report of the run in a browser: {trained / REPORT_NAME}")


def _summary(record: RunRecord, model: Path) -> dict[str, Any]:
    curves = curves_of(record.history)
    rewards, evaluations = (list(curves[name].values()) for name in ("reward", "eval_reward"))
    settings = {name: record.settings[name] for name in ("entropy_coef", "max_completion_length")}
    # the first rollout: the last one's rewards are all alike, so its advantages are 0
    files = sorted((record.folder / "completions").glob("completions_*.parquet"))
    rows = parquet.read_table(files[0]).to_pylist()[:_COMPARED]
    differences = compare.rollout_difference(model, rows, LossConfig(**settings))
    prompt, samples = next(iter(prompt_samples(record.folder).items()))
    first, last = samples[min(samples)], samples[max(samples)]  # best first
    return {
        # means over the first and the last logged training steps
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        # of sampled completions on held-out prompts
        "eval_reward_first": evaluations[0],
        "eval_reward_last": evaluations[-1],
        # of a prompt that came back often: those of the middle reward
        "prompt": prompt.text,
        "completion_first": first[len(first) // 2].text,
        "completion_last": last[len(last) // 2].text,
        # fused fp32 against eager fp64
        "loss_max_abs_diff": differences[0],
        "grad_max_rel_diff": differences[1],
        "heads": compare.compare(),
    }


def _write_rows(path: Path, rows: History) -> None:
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _plot_curves(path: Path, curves: Curves) -> None:
    """Plot reward, entropy and completion length over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots(1, len(_PANELS))
    for axis, (title, name) in zip(axes, _PANELS.items(), strict=True):
        axis.plot(*zip(*curves[name].items(), strict=True), label="training")
        held_out = curves[f"eval_{name}"]
        axis.plot(*zip(*held_out.items(), strict=True), "o", label="held-out prompts")
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def _told(summary: dict[str, Any]) -> str:
    """Return what the policy has learned, how exact the loss is, and the table of the heads."""
    asked = f"a completion of {summary['prompt']}"
    rows = {
        "mean reward, held-out prompts": "{eval_reward_first:>10.3f}{eval_reward_last:>10.3f}",
        "mean reward, training": "{reward_first:>10.3f}{reward_last:>10.3f}",
        asked: "{completion_first!r:>10}{completion_last!r:>10}",
    }
    lines = [f"{'':<32}{'before':>10}{'after':>10}"]
    lines += [f"{name:<32}{values.format(**summary)}" for name, values in rows.items()]
    device = "a GPU" if torch.cuda.is_available() else "one thread"
    lines += [
        "",
        f"On a rollout the fused loss is within {summary['loss_max_abs_diff']:.1e} of full logits "
        f"in fp64, its gradients within {summary['grad_max_rel_diff']:.1e} of theirs.",
        "",
        f"One loss and its gradients in bf16, {compare.TOKENS} tokens x {compare.VOCABULARY} "
        f"entries, {device}:",
        *_compared(summary["heads"]),
    ]
    return "\n".join(lines)


def _compared(heads: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of the heads, and in words how the others compare with the first."""
    yield f"{'':<24}{'time':>10}{'peak memory':>14}{'gradient error':>16}"
    for head in heads:
        time_of_it, memory = f"{1000 * head['seconds']:.0f} ms", f"{head['peak_bytes'] >> 20} MiB"
        yield f"{head['name']:<24}{time_of_it:>10}{memory:>14}{head['error']:>16.0e}"
    ours, *others = heads
    better = []
    for other in others:
        ratios = {name: other[name] / ours[name] for name in _QUANTITIES}
        said = [f"{ratios[name]:.1f} times the {words}" for name, words in _QUANTITIES.items()]
        yield f"{other['name']}: {', '.join(said)} of {ours['name']}."
        better += [
            f"{other['name']} in {words}" for name, words in _QUANTITIES.items() if ratios[name] < 1
        ]
    if better:
        yield f"Better than {ours['name']} here: {', '.join(better)}."


if __name__ == "__main__":
    main()
