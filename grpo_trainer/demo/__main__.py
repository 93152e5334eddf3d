"""Builds the task and the policy, trains by ``grpo-train``, compares the heads, reports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_kernels import LossConfig
from grpo_kernels.tools import OneLineParser, count
from grpo_trainer import cli
from grpo_trainer.data import load_prompts
from grpo_trainer.demo import compare, head, report
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import DIGITS, write_dataset
from grpo_trainer.report import REPORT_NAME, Sample, prompt_samples

STEPS = 200
GROUP = 16
PROMPTS_PER_STEP = 32
EVAL_GROUP = 4
ENTROPY_COEF = 0.05  # keeps the policy exploring until it has found where to stop


class _Rollout(NamedTuple):
    """What an engine needs of the run."""

    heads: int  # of the policy's attention
    settings: dict[str, Any]


_ENGINE = {
    "enforce_eager": True,
    "max_num_seqs": GROUP * PROMPTS_PER_STEP,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
}
ROLLOUTS = {
    "transformers": _Rollout(heads=4, settings={}),
    # on a CPU, vLLM's heads have a multiple of 32 channels
    "vllm": _Rollout(
        heads=2,
        settings={
            "use_vllm": True,
            "vllm_gpu_memory_utilization": 0.1,
            "vllm_engine_kwargs": json.dumps(_ENGINE),
        },
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m grpo_trainer.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Folder for results.")
    parser.add_argument("--steps", type=count, default=STEPS, help="Optimizer steps.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights, data split and sampling.")
    parser.add_argument(
        "--rollout", choices=tuple(ROLLOUTS), default="transformers", help="Engine."
    )
    options = parser.parse_args(argv)
    engine = ROLLOUTS[options.rollout]
    start = time.perf_counter()
    # the policy is too small to share: more threads would mostly wait for one another
    torch.set_num_threads(1)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    train_file, eval_file = write_dataset(out, options.seed)
    write_policy(out / "model", options.seed, engine.heads)
    run = _arguments(out, train_file, eval_file, options.steps, options.seed) | engine.settings
    cli.main([word for name, value in run.items() for word in (f"--{name}", str(value))])
    history = json.loads((out / "trained" / "trainer_state.json").read_text())["log_history"]
    summary = _summary(out, eval_file, history, start)
    (out / "summary.json").write_text(json.dumps(vars(summary), indent=2) + "\n")
    report.write_csv(out, history)
    report.plot_curves(out, history)
    device = "a GPU" if torch.cuda.is_available() else "one thread"
    shape = f"{compare.TOKENS} tokens x {compare.VOCABULARY} entries, fp32, {device}"
    print(f"\n{report.table(summary)}\n\n{report.head_table(summary.heads, shape)}\n")
    if missing := set(compare.HEADS) - {row["name"] for row in summary.heads}:
        print(f"not installed, so not compared: {', '.join(sorted(missing))}\n")
    print(f"{summary.seconds:.0f} seconds; summary.json, metrics.csv, curves.png: {out}")
    print(f"open the report of the run in a browser: {out / 'trained' / REPORT_NAME}")


def _arguments(out: Path, train: Path, evaluation: Path, steps: int, seed: int) -> dict[str, Any]:
    """Return the arguments of ``grpo-train`` for this run."""
    return {
        "model_name_or_path": out / "model",
        "dataset_name": train,
        "eval_dataset_name": evaluation,
        "reward_funcs": "grpo_trainer.demo.task.digits_reversal_reward",
        "output_dir": out / "trained",
        "overwrite_output_dir": True,
        "run_name": f"reversing {DIGITS} digits",
        "max_steps": steps,
        "per_device_train_batch_size": GROUP * PROMPTS_PER_STEP,
        "num_generations": GROUP,
        "max_completion_length": DIGITS + 1,
        "learning_rate": 2e-3,
        "entropy_coef": ENTROPY_COEF,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": min(5, steps),
        "log_completions": True,
        "num_completions_to_print": 0,
        "eval_strategy": "steps",
        "eval_steps": steps,
        "eval_on_start": True,
        "per_device_eval_batch_size": EVAL_GROUP * 128,
        "num_generations_eval": EVAL_GROUP,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": seed,
    }


def _summary(out: Path, eval_file: Path, history: report.History, start: float) -> report.Summary:
    config = LossConfig(entropy_coef=ENTROPY_COEF, max_completion_length=DIGITS + 1)
    # the first policy's rollout: the last one's rewards are all alike, so its advantages are 0
    prompts = load_prompts(str(eval_file)).select(range(32))
    difference = head.rollout_difference(out / "model", prompts, config)
    training, evaluations = report.training_rows(history), report.evaluation_rows(history)
    asked, samples = next(iter(prompt_samples(out / "trained").items()))
    return report.Summary(
        reward_first=training[0]["reward"],
        reward_last=training[-1]["reward"],
        eval_reward_first=evaluations[0]["eval_reward"],
        eval_reward_last=evaluations[-1]["eval_reward"],
        prompt=asked.text,
        completion_first=_middle(samples[min(samples)]),
        completion_last=_middle(samples[max(samples)]),
        loss_max_abs_diff=difference.loss,
        grad_max_rel_diff=difference.gradient,
        heads=[row._asdict() for row in compare.compare()],
        seconds=time.perf_counter() - start,
    )


def _middle(samples: list[Sample]) -> str:
    """Return the completion of the middle one, which come best first."""
    return samples[len(samples) // 2].text


if __name__ == "__main__":
    main()
