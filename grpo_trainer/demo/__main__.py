"""Builds the task and the policy, trains by ``grpo-train``, compares the heads, reports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from grpo_kernels import LossConfig
from grpo_kernels.tools import OneLineParser, count
from grpo_trainer import cli
from grpo_trainer.data import load_prompts
from grpo_trainer.demo import compare, head, report
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import DIGITS, write_dataset
from grpo_trainer.monitor import RunRecord, load_run
from grpo_trainer.report import REPORT_NAME, prompt_samples

STEPS = 200
CONFIG = Path(__file__).with_name("run.yaml")

_VLLM = {
    "enforce_eager": True,
    "max_num_seqs": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
}
# engine -> arguments of a run
ROLLOUTS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm": {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_engine_kwargs": json.dumps(_VLLM),
    },
}
HEADS = {"transformers": 4, "vllm": 2}  # on a CPU, vLLM's have a multiple of 32 channels


def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m grpo_trainer.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Folder for results.")
    parser.add_argument("--steps", type=count, default=STEPS, help="Optimizer steps.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights, data split and sampling.")
    parser.add_argument(
        "--rollout", choices=tuple(ROLLOUTS), default="transformers", help="Engine."
    )
    options = parser.parse_args(argv)
    start = time.perf_counter()
    # the policy is too small to share: more threads would mostly wait for one another
    torch.set_num_threads(1)
    out, steps, trained = options.out, options.steps, options.out / "trained"
    out.mkdir(parents=True, exist_ok=True)
    train_file, eval_file = write_dataset(out, options.seed)
    write_policy(out / "model", options.seed, HEADS[options.rollout])
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
    } | ROLLOUTS[options.rollout]
    cli.main([word for name, value in run.items() for word in (f"--{name}", str(value))])
    record = load_run(trained)
    summary = _summary(record, out, eval_file) | {"seconds": time.perf_counter() - start}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.write_csv(out, record.history)
    report.plot_curves(out, record.history)
    device = "a GPU" if torch.cuda.is_available() else "one thread"
    shape = f"{compare.TOKENS} tokens x {compare.VOCABULARY} entries, fp32, {device}"
    print(f"\n{report.table(summary)}\n\n{report.head_table(summary['heads'], shape)}\n")
    if missing := set(compare.HEADS) - {row["name"] for row in summary["heads"]}:
        print(f"not installed, so not compared: {', '.join(sorted(missing))}\n")
    print(f"{summary['seconds']:.0f} seconds; summary.json, metrics.csv, curves.png: {out}")
    print(f"open the report of the run in a browser: {trained / REPORT_NAME}")


def _summary(record: RunRecord, out: Path, eval_file: Path) -> dict[str, Any]:
    settings = {name: record.settings[name] for name in ("entropy_coef", "max_completion_length")}
    # the first policy's rollout: the last one's rewards are all alike, so its advantages are 0
    prompts = load_prompts(str(eval_file)).select(range(32))
    config = LossConfig(**settings)
    loss_difference, gradient_difference = head.rollout_difference(out / "model", prompts, config)
    training = report.rows_with("reward", record.history)
    evaluations = report.rows_with("eval_reward", record.history)
    prompt, samples = next(iter(prompt_samples(record.folder).items()))
    first, last = samples[min(samples)], samples[max(samples)]  # best first
    return {
        # means over the first and the last logged training steps
        "reward_first": training[0]["reward"],
        "reward_last": training[-1]["reward"],
        # of sampled completions on held-out prompts
        "eval_reward_first": evaluations[0]["eval_reward"],
        "eval_reward_last": evaluations[-1]["eval_reward"],
        # of a prompt that came back often: those of the middle reward
        "prompt": prompt.text,
        "completion_first": first[len(first) // 2].text,
        "completion_last": last[len(last) // 2].text,
        # fused fp32 against eager fp64
        "loss_max_abs_diff": loss_difference,
        "grad_max_rel_diff": gradient_difference,
        "heads": compare.compare(),
    }


if __name__ == "__main__":
    main()
