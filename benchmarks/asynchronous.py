"""A run of the demo's task with a simulated server, and checks that any such run must pass."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import load_dataset
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from benchmarks.simulated import SimulatedServer, token_logprobs
from benchmarks.training import QUIET

PROMPTS, SIZE = 8, 16  # of a step; completions of each
TRAINING = 0.1  # seconds that a training step waits, as a larger model would need
MAX_STALENESS = 4  # optimizer steps, if weights move in flight
CORRECTION = "token_truncate"
_ALLOWED = 1e-4  # of a log-probability, which the server computes in other batches
_SETTINGS: dict[str, Any] = QUIET | {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "entropy_coef": 0.05,
    "loss_type": "dapo",
    "epsilon_high": 0.2,
    "per_device_train_batch_size": PROMPTS * SIZE,
    "num_generations": SIZE,
    "max_completion_length": 4,
    "vllm_importance_sampling_mode": CORRECTION,
    "use_cpu": True,
    "bf16": False,
    "write_report": False,
}


@dataclass(frozen=True)
class Way:
    """The number of batches sampled ahead, and whether weights move in flight."""

    note: str
    ahead: int
    max_staleness: int | None = None


WAYS = {
    "0-ahead": Way("none ahead", 0),
    "1-ahead": Way("one batch ahead", 1),
    "2-ahead": Way("two batches ahead", 2),
    "1-ahead-in-flight": Way("one batch ahead, weights in flight", 1, MAX_STALENESS),
    "2-ahead-in-flight": Way("two batches ahead, weights in flight", 2, MAX_STALENESS),
}


@dataclass(frozen=True)
class Trained:
    """A completion in a training step."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]  # optimizer steps before the weights of each token
    ages: list[int]  # in optimizer steps
    in_loss: list[int]


class Watch(TrainerCallback):
    """Records the completions and the time of each step, and the policy's weights after it."""

    def __init__(self) -> None:
        self.trained: list[Trained] = []
        self.seconds: list[float] = []
        self.weights: list[dict[str, Tensor]] = []  # by number of optimizer steps
        self._step = 0
        self._start = 0.0

    def __call__(self, batch: Any, policy: Any) -> None:
        """Record a batch, as a column of the trainer."""
        self.trained += [
            Trained(
                prompt=sample.prompt,
                prompt_ids=sample.prompt_ids,
                ids=sample.completion_ids,
                logprobs=sample.logprobs,
                versions=sample.rollout_versions,
                ages=[self._step - version for version in sample.rollout_versions],
                in_loss=sample.in_loss,
            )
            for sample in batch.samples
        ]

    def on_train_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        self._note(run["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        time.sleep(TRAINING)

    def on_step_end(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self._step = state.global_step
        self._note(run["model"])

    def _note(self, policy: PreTrainedModel) -> None:
        self.weights.append({name: x.clone() for name, x in policy.state_dict().items()})
        self._start = time.perf_counter()


def run(way: Way, steps: int, seed: int) -> dict[str, Any]:
    """Return times, ages, and rewards of a run, and what is wrong with it, or None."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _build(way, watch, steps, seed, Path(folder))
        trainer.train()
        trainer.rollouts.close()
    ages = [age for one in watch.trained for age in one.ages]
    in_loss = [kept for one in watch.trained for kept in one.in_loss]
    outcome = {
        "rewards": [row["reward"] for row in trainer.state.log_history if "loss" in row],
        "staleness": fmean(ages),
        "oldest": max(ages),
        "left_out": in_loss.count(0) / len(in_loss),
        "logp_error": logp_error(watch, trainer.model),
    }
    prompts = trainer.train_dataset["prompt"]
    return outcome | {"seconds": watch.seconds, "wrong": find_error(way, watch, prompts, outcome)}


def _build(way: Way, watch: Watch, steps: int, seed: int, folder: Path) -> Any:
    from grpo_trainer import GRPOConfig, GRPOTrainer
    from grpo_trainer.demo.policy import make_policy, make_tokenizer
    from grpo_trainer.demo.task import digits_reversal_reward, write_dataset

    tokenizer = make_tokenizer()
    train_file, _ = write_dataset(folder, seed)
    rows = load_dataset("json", data_files=str(train_file), split="train")
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=steps,
        seed=seed,
        generation_batches_ahead=way.ahead,
        max_staleness=way.max_staleness,
        **_SETTINGS,
    )
    trainer = GRPOTrainer(
        make_policy(tokenizer, seed),
        digits_reversal_reward,
        args,
        rows.select(range(steps * PROMPTS)),
        processing_class=tokenizer,
        rollout_engine=SimulatedServer(make_policy(tokenizer, seed), seed),
        columns=[watch],
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def find_error(way: Way, watch: Watch, prompts: list[str], outcome: dict[str, Any]) -> str | None:
    """Return the rule that a run of this way broke, or None."""
    times = Counter(one.prompt for one in watch.trained)
    if times != dict.fromkeys(prompts, SIZE):
        return "a prompt was not trained on exactly once"
    most = way.ahead if way.max_staleness is None else way.max_staleness
    for one in watch.trained:
        if one.in_loss != [int(0 <= age <= most) for age in one.ages]:
            return f"expected ages of 0 to {most} in the loss, got {one.ages} and {one.in_loss}"
    if way.max_staleness is None and outcome["left_out"]:
        return "a token was left out"
    if not outcome["logp_error"] <= _ALLOWED:
        return f"log-probabilities are off by {outcome['logp_error']:.1e}"
    rewards = outcome["rewards"]
    complete = len(rewards) == len(watch.weights) - 1 and all(map(math.isfinite, rewards))
    return None if complete else "a step is missing or its reward not finite"


@torch.no_grad()
def logp_error(watch: Watch, policy: PreTrainedModel) -> float:
    """Return the error of recorded log-probabilities, given the weights of their version."""
    policy.eval()
    errors = [0.0]
    for version, weights in enumerate(watch.weights):
        drawn = [one for one in watch.trained if version in one.versions]
        if not drawn:
            continue
        policy.load_state_dict(weights)
        logps = token_logprobs(policy, [one.prompt_ids + one.ids for one in drawn])
        for row, one in zip(logps, drawn, strict=True):
            start = len(one.prompt_ids) - 1
            of_ids = row[range(start, start + len(one.ids)), one.ids].tolist()
            errors += [
                abs(own - recorded)
                for own, recorded, drawn_by in zip(of_ids, one.logprobs, one.versions, strict=True)
                if drawn_by == version
            ]
    return max(errors)
