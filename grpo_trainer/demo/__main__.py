"""Train a tiny policy with ``grpo-train``, and print its reward before and after."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from grpo_kernels.tools import OneLineParser, count
from grpo_trainer import cli
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import DIGITS, write_dataset
from grpo_trainer.monitor import load_run

CONFIG = Path(__file__).with_name("run.yaml")

# settings of a run in which vLLM generates
_ENGINE = {
    "enforce_eager": True,
    "max_num_seqs": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
}
_VLLM = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_engine_kwargs": json.dumps(_ENGINE),
}


def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m grpo_trainer.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Folder for results.")
    parser.add_argument("--steps", type=count, default=200, help="Optimizer steps.")
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed for weights, data split and sampling."
    )
    engines = ("transformers", "vllm")
    parser.add_argument("--rollout", choices=engines, default="transformers", help="Engine.")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # so small a policy gains nothing from more threads
    # the demo's files are read and written in no time
    disable_progress_bar()
    disable_progress_bars()

    with_vllm = options.rollout == "vllm"
    model, trained = options.out / "model", options.out / "trained"
    # on a CPU, vLLM needs head sizes that are a multiple of 32
    policy = write_policy(model, options.seed, heads=2 if with_vllm else 4)
    train_file, eval_file = write_dataset(options.out, options.seed)
    print(
        f"A {policy.num_parameters():,}-parameter transformer learns to write {DIGITS} digits "
        "backwards, from its own samples.",
        flush=True,
    )
    run = {
        "config": CONFIG,
        "model_name_or_path": model,
        "dataset_name": train_file,
        "eval_dataset_name": eval_file,
        "output_dir": trained,
        "run_name": f"reversing {DIGITS} digits",
        "max_completion_length": DIGITS + 1,
        "max_steps": options.steps,
        "logging_steps": min(5, options.steps),
        "eval_steps": options.steps,
        "seed": options.seed,
    } | (_VLLM if with_vllm else {})
    cli.main([word for name, value in run.items() for word in (f"--{name}", str(value))])

    history = load_run(trained).history
    rewards = [row["eval_reward"] for row in history if "eval_reward" in row]
    print(
        f"Mean reward on held-out prompts (1 = correct): {rewards[0]:.3f} before, "
        f"{rewards[-1]:.3f} after"
    )


if __name__ == "__main__":
    main()
