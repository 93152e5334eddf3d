"""Run by test_two_processes.py, in its process and under a launcher: trains, keeps what came out.

Every run is one generation batch and one or two micro-batches per step, of unequal lengths.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from filelock import FileLock
from transformers import TrainerCallback

from grpo_kernels.losses import LOSSES
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from tests.support.tools import (
    ScriptedEngine,
    add,
    call,
    make_small_policy,
    make_tool_tokenizer,
    question,
    results,
)
from tests.support.trainer import BackgroundEngine, canned, parameters
from tests.support.vision import make_vision_trainer

ROWS = 16  # completions of a generation batch
METRICS = (
    "reward", "reward_std", "frac_reward_zero_std", "num_tokens", "entropy", "kl", "ratio/max",
    "completions/min_length", "completions/mean_terminated_length", "loss", "grad_norm",
    "entropy_coef", "dynamic_sampling/resampling_rounds", "dynamic_sampling/discarded_groups",
    "dynamic_sampling/unfilled_groups", "eval_reward", "eval_entropy", "eval_loss",
    "sampling/staleness", "sampling/sampling_logp_difference/mean",
    "backward_entries", "backward_whole_rows",
    "tools/call_frequency", "tools/failure_frequency", "eval_tools/call_frequency",
)  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    # one loss of each aggregation
    **{
        name: {"loss_type": name}
        for name in {LOSSES[name].aggregation: name for name in reversed(LOSSES)}.values()
    },
    "reference": {"beta": 0.05, "gradient_accumulation_steps": 2},
    "iterations": {"num_iterations": 2},
    # so small that what is left out of a small vocabulary is far below rounding
    "bounded": {"backward_tolerance": 1e-6, "gradient_accumulation_steps": 2},
    "entropy bonus": {"loss_type": "bnpo", "entropy_coef": 0.3},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
    "masked": {"mask_truncated_completions": True, "loss_type": "bnpo"},
    "dynamic": {"dynamic_sampling": True, "max_resampling_rounds": 2},
    "groups over processes": {"num_generations": 16},
    "resumed": {"dynamic_sampling": True, "max_resampling_rounds": 2, "save_steps": 1},
    "interrupted": {"dynamic_sampling": True, "max_resampling_rounds": 2},
    "stream": {"eval_strategy": "steps", "eval_steps": 2},
    "overlap": {"overlap_generation": True, "eval_strategy": "steps", "eval_steps": 1},
    # the folder of the completions cannot be made
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "log_completions": True,
        "num_completions_to_print": 0,
    },
    "tools": {"max_completion_length": 120, "eval_strategy": "steps", "eval_steps": 2},
    "curriculum": {"dynamic_prompts_form": "groups"},  # its function is below
    "images": {"beta": 0.05, "num_iterations": 2},
}


def lengths_reward(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


def rare_reward(prompts, completion_ids, **kwargs):
    """Reward the completions of every third prompt differently."""
    rewards = lengths_reward(completion_ids)
    return [
        value if int(prompt[:2]) % 3 == 0 else 1.0
        for prompt, value in zip(prompts, rewards, strict=True)
    ]


def longer_prompts(prompts, completions, rewards, metas):
    """Let the first prompt grow; the second is one of the dataset, others stay."""
    assert all(len(group) == 4 for group in completions) and len(set(rewards)) > 1
    return [f"1{prompts[0]}", None, *prompts[2:]]


def run(name: str, folder: str, processes: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 1, "num_generations": 4}
    settings |= {"max_completion_length": 4} | RUNS[name]
    if name == "curriculum":
        settings["dynamic_prompts_fn"] = longer_prompts
    out = Path(folder, name)
    if name == "evaluation":
        out.mkdir(exist_ok=True)
        (out / "completions").touch()
    micro_batches = settings["gradient_accumulation_steps"]
    args = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=ROWS // micro_batches // processes,
        per_device_eval_batch_size=ROWS // 2 // processes,
        max_steps=2,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=2,
        save_strategy="steps" if name == "resumed" else "no",
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        disable_tqdm=True,
        report_to="none",
        **settings,
    )
    trainer = make_trainer(name, args)
    if name == "interrupted":
        if int(os.environ.get("RANK", 0)) == processes - 1:
            trainer.add_callback(PressesCtrlC())
        with pytest.raises(KeyboardInterrupt, match="after step 1; newest checkpoint: "):
            trainer.train()
        trainer = make_trainer(name, args)
        trainer.train(resume_from_checkpoint=True)
    else:
        trainer.train()
    if name == "resumed":
        trainer = make_trainer(name, args)
        check_refusals(trainer, out)
        trainer.train(resume_from_checkpoint=out / "checkpoint-1")
    log = {key: value for row in trainer.state.log_history for key, value in row.items()}
    metrics = {key: log[key] for key in METRICS if key in log}
    return {"parameters": parameters(trainer.model), "metrics": metrics}


class PressesCtrlC(TrainerCallback):
    """Does so in the first step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            signal.raise_signal(signal.SIGINT)


def check_refusals(trainer: GRPOTrainer, out: Path) -> None:
    """Check that all processes raise what one of them finds."""

    def refused(message: str, **resume: Any) -> None:
        trainer.accelerator.wait_for_everyone()
        with pytest.raises(ValueError, match=message):
            trainer.train(**resume)
        trainer.accelerator.wait_for_everyone()

    lock = FileLock(out / "_training.lock")
    if trainer.accelerator.is_main_process:
        lock.acquire()
    refused("expected a folder without a run in it")
    lock.release()
    (out / "checkpoint-2" / "process_state_0.pt").unlink(missing_ok=True)
    refused("checkpoint-2 has no process_state_0.pt", resume_from_checkpoint=True)


def make_trainer(name: str, args: GRPOConfig) -> GRPOTrainer:
    if name == "tools":
        return make_tool_trainer(args)
    if name == "images":
        return canned(make_vision_trainer("llava", args, lengths_reward))
    tokenizer = make_tokenizer()
    rows = [{"prompt": f"{i % 10}{i // 2}="} for i in range(20)]
    train = Dataset.from_list(rows)
    test = train.select(range(4))
    if name == "stream":
        train, test = train.to_iterable_dataset(), test.to_iterable_dataset()
    policy = make_policy(tokenizer, seed=0)
    reward = rare_reward if args.dynamic_sampling else lengths_reward
    if name == "overlap":
        rank, own = int(os.environ.get("RANK", 0)), make_policy(tokenizer, seed=0).eval()
        engine = BackgroundEngine(tokenizer, own, rank)
        return GRPOTrainer(
            policy, reward, args, train, test, tokenizer, rollout_engine=engine
        )  # fmt: skip
    return canned(GRPOTrainer(policy, reward, args, train, test, tokenizer))


def make_tool_trainer(args: GRPOConfig) -> GRPOTrainer:
    """Make no call, one, or one too many to fit: one process has ended while the other goes on."""

    def script(text: str, row: int) -> str:
        wanted, done = int(text.split("user\n")[1][0]), len(results(text))
        mark = "abcd"[row % 4] if done == 0 else ""  # tells a group's completions apart
        return mark + (call("add", a=1, b=1) if done < wanted else "end")

    def reward(completion_ids, **kwargs):
        return [float(len(ids) % 7 + row % 2) for row, ids in enumerate(completion_ids)]

    tokenizer = make_tool_tokenizer()
    rows = Dataset.from_list([{"prompt": question(str(n % 3))} for n in range(12)])
    engine = ScriptedEngine(tokenizer, script, by_row=True)
    return GRPOTrainer(
        make_small_policy(len(tokenizer)), reward, args, rows, rows.select(range(4)), tokenizer,
        tools=[add], rollout_engine=engine,
    )  # fmt: skip


def main(folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    results = {name: run(name, folder, processes) for name in names}
    if int(os.environ.get("RANK", 0)) == 0 and processes > 1:
        torch.save(results, f"{folder}/results.pt")
    if dist.is_initialized():  # a process that leaves early may abort
        dist.barrier()
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
