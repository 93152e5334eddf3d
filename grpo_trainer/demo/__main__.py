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
from grpo_trainer.report import REPORT_NAME, prompt_samples

STEPS = 200
GROUP = 16
PROMPTS_PER_STEP = 32
EVAL_GROUP = 4
ENTROPY_COEF = 0.05  # keeps the policy exploring until it has found where to stop

_VLLM = {
    "enforce_eager": True,
    "max_num_seqs": GROUP * PROMPTS_PER_STEP,
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
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    train_file, eval_file = write_dataset(out, options.seed)
    write_policy(out / "model", options.seed, HEADS[options.rollout])
    run = {
        "model_name_or_path": out / "model",
        "dataset_name": train_file,
        "eval_dataset_name": eval_file,
        "reward_funcs": "grpo_trainer.demo.task.digits_reversal_reward",
        "output_dir": out / "trained",
        "overwrite_output_dir": True,
        "run_name": f"reversing {DIGITS} digits",
        "max_steps": options.steps,
        "per_device_train_batch_size": GROUP * PROMPTS_PER_STEP,
        "num_generations": GROUP,
        "max_completion_length": DIGITS + 1,
        "learning_rate": 2e-3,
        "entropy_coef": ENTROPY_COEF,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": min(5, options.steps),
        "log_completions": True,
        "num_completions_to_print": 0,
        "eval_strategy": "steps",
        "eval_steps": options.steps,
        "eval_on_start": True,
        "per_device_eval_batch_size": EVAL_GROUP * 128,
        "num_generations_eval": EVAL_GROUP,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": options.seed,
    } | ROLLOUTS[options.rollout]
    cli.main([word for name, value in run.items() for word in (f"--{name}", str(value))])
    history = json.loads((out / "trained" / "trainer_state.json").read_text())["log_history"]
    summary = _summary(out, eval_file, history) | {"seconds": time.perf_counter() - start}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.write_csv(out, history)
    report.plot_curves(out, history)
    device = "a GPU" if torch.cuda.is_available() else "one thread"
    shape = f"{compare.TOKENS} tokens x {compare.VOCABULARY} entries, fp32, {device}"
    print(f"\n{report.table(summary)}\n\n{report.head_table(summary['heads'], shape)}\n")
    if missing := set(compare.HEADS) - {row["name"] for row in summary["heads"]}:
        print(f"not installed, so not compared: {', '.join(sorted(missing))}\n")
    print(f"{summary['seconds']:.0f} seconds; summary.json, metrics.csv, curves.png: {out}")
    print(f"open the report of the run in a browser: {out / 'trained' / REPORT_NAME}")


def _summary(out: Path, eval_file: Path, history: report.History) -> dict[str, Any]:
    config = LossConfig(entropy_coef=ENTROPY_COEF, max_completion_length=DIGITS + 1)
    # the first policy's rollout: the last one's rewards are all alike, so its advantages are 0
    prompts = load_prompts(str(eval_file)).select(range(32))
    loss_difference, gradient_difference = head.rollout_difference(out / "model", prompts, config)
    training, evaluations = report.training_rows(history), report.evaluation_rows(history)
    prompt, samples = next(iter(prompt_samples(out / "trained").items()))
    # the middle ones of a step's completions, which come best first
    first, last = (
        samples[step][len(samples[step]) // 2].text for step in (min(samples), max(samples))
    )
    return {
        # means over the first and the last logged training steps
        "reward_first": training[0]["reward"],
        "reward_last": training[-1]["reward"],
        # of sampled completions on held-out prompts
        "eval_reward_first": evaluations[0]["eval_reward"],
        "eval_reward_last": evaluations[-1]["eval_reward"],
        "prompt": prompt.text,  # of those that came back most often
        "completion_first": first,
        "completion_last": last,
        # fused fp32 against eager fp64
        "loss_max_abs_diff": loss_difference,
        "grad_max_rel_diff": gradient_difference,
        "heads": [row._asdict() for row in compare.compare()],  # ours first
    }


if __name__ == "__main__":
    main()
