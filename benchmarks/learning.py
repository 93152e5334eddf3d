"""What a policy learns with exact and with sampled gradients of the head, on several seeds.

``python -m benchmarks.learning SIZE SEED``: all arms on one seed, in a process of its own.

The task is that of the demo, under a vocabulary with many more ids than it needs. The policy was
trained on answers before, some of their digits right. So it is like a model before its RL: surer of
some tokens than of others, and the ids that no text has share a tail.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.child import ask
from benchmarks.results import LearningRow, LearningTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_LONGEST = 3600.0  # seconds of a seed
_GROUP = 16
_BEFORE_RATE = 3e-3  # of the policy's training on answers
_RIGHT = 0.5  # share of right digits among these
METRICS = ("reward", "entropy", "backward_entries", "backward_whole_rows", "backward_error")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of all runs."""

    vocabulary: int = 1024
    prompts: int = 8  # of a step
    before: int = 200  # steps of training on answers
    steps: int = 300
    every: int = 10  # steps from one point of a curve to the next
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rate: float = 1e-3


SIZES = {
    "full": Size(),
    "quick": Size(vocabulary=256, prompts=2, before=20, steps=2, every=1, seeds=(0, 1)),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to compute the head's gradients."""

    name: str
    note: str
    settings: dict[str, Any]  # of GRPOConfig


ARMS = (
    Arm(name="exact", note="every gradient exact", settings={}),
    Arm(
        name="bounded",
        note="backward_tolerance=2e-3: both gradients from entries",
        settings={"backward_tolerance": 2e-3, "backward_exact_weight": False},
    ),
    Arm(
        name="exact-weight",
        note="the same with backward_exact_weight: the hidden states' from entries alone",
        settings={"backward_tolerance": 2e-3},
    ),
)


def measure_learning(size: str) -> LearningTable:
    """Train every arm on every seed, each seed in a process of its own."""
    config = SIZES[size]
    rows = [LearningRow(arm.name, arm.note, seeds=list(config.seeds)) for arm in ARMS]
    for seed in config.seeds:
        answer = ask("benchmarks.learning", [size, str(seed)], _LONGEST, OMP_NUM_THREADS="1")
        for row in rows:
            if "failure" in answer:
                row.failure = answer["failure"]
                continue
            for name, curve in answer[row.provider].items():
                row.curves.setdefault(name, []).append(curve)
    return LearningTable(
        model=f"the demo's policy, vocabulary {config.vocabulary}",
        tokens=config.prompts * _GROUP * _completion_length(),
        vocabulary=config.vocabulary,
        dtype="fp32",
        steps=config.steps,
        every=config.every,
        rows=rows,
    )


def run(config: Size, seed: int, arms: Sequence[Arm] = ARMS) -> dict[str, dict[str, list[float]]]:
    """Return curves by metric of every arm: points of the mean over the steps between them."""
    from grpo_trainer.demo.policy import make_tokenizer
    from grpo_trainer.demo.task import write_dataset

    tokenizer = make_tokenizer()
    model = _policy(tokenizer, config, seed)
    with tempfile.TemporaryDirectory() as folder:
        data, _ = write_dataset(Path(folder), seed)
        return {
            arm.name: _train(copy.deepcopy(model), tokenizer, data, config, seed, arm)
            for arm in arms
        }


def _policy(tokenizer: PreTrainedTokenizerFast, config: Size, seed: int) -> PreTrainedModel:
    """Return a policy that has been trained on answers."""
    from grpo_trainer.demo.policy import make_policy

    model = make_policy(tokenizer, seed)
    model.resize_token_embeddings(config.vocabulary, mean_resizing=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_BEFORE_RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.before):
        ids = _answers(tokenizer, generator)
        first = ids.shape[1] // 2 - 1  # that predicts a token of the answer
        logits = model(ids[:, :-1]).logits[:, first:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, first + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _answers(
    tokenizer: PreTrainedTokenizerFast, generator: torch.Generator, count: int = 128
) -> torch.Tensor:
    """Return ids of ``count`` tasks with answers, some digits of which are right."""
    from grpo_trainer.demo.task import DIGITS

    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    asked, other = digits[torch.randint(10, (2, count, DIGITS), generator=generator)]
    right = torch.rand(count, DIGITS, generator=generator) < _RIGHT
    answer = torch.where(right, asked.flip(1), other)
    sign = torch.full((count, 1), tokenizer.convert_tokens_to_ids("="))
    end = torch.full((count, 1), tokenizer.eos_token_id)
    return torch.cat([asked, sign, answer, end], 1)


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    data: Path,
    config: Size,
    seed: int,
    arm: Arm,
) -> dict[str, list[float]]:
    from transformers import PrinterCallback

    from grpo_trainer import GRPOConfig, GRPOTrainer
    from grpo_trainer.data import load_prompts
    from grpo_trainer.demo.task import digits_reversal_reward

    args = GRPOConfig(
        output_dir=str(data.parent / arm.name),
        use_cpu=True,
        max_steps=config.steps,
        per_device_train_batch_size=config.prompts * _GROUP,
        num_generations=_GROUP,
        max_completion_length=_completion_length(),
        learning_rate=config.learning_rate,
        gradient_checkpointing=False,
        logging_steps=config.every,
        save_strategy="no",
        report_to="none",
        write_report=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=seed,
        **arm.settings,
    )
    trainer = GRPOTrainer(
        model, digits_reversal_reward, args, load_prompts(str(data)), processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    names = [name for name in METRICS if any(name in row for row in rows)]
    # steps without an advantage have no backward
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def _completion_length() -> int:
    from grpo_trainer.demo.task import DIGITS

    return DIGITS + 1  # with the end


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(SIZES[sys.argv[1]], int(sys.argv[2]))), flush=True)
