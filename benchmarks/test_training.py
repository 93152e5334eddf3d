"""A GRPO step of a small model with a real head, generation included, next to TRL."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from benchmarks import text, training
from benchmarks.check import StepResult, compare_steps, why_wrong
from benchmarks.conftest import DEVICE, Session, check_row
from benchmarks.measure import attempt, free, race
from benchmarks.providers.base import Provider, is_ours
from benchmarks.results import Row
from benchmarks.training import TRAINERS, TrainingConfig, Watch
from grpo_kernels import LossConfig, TokenBatch, policy_loss

_ROUNDS = 5  # steps, after one to warm up
_LOSS = LossConfig(loss_type="dapo", epsilon=0.2)
NOTES = {name: trainer.note for name, trainer in TRAINERS.items()}
CASES = {
    "tiny": [training.sized("tiny", DEVICE)],
    "quick": [training.sized("quick", DEVICE)],
    "cpu": [training.SIZES["full"]],
    "gpu": [training.sized("full-gpu", DEVICE)],
    "gpu-full": [training.sized("full-gpu", DEVICE)],
}


def about(case: TrainingConfig, device: str) -> str:
    return "errors against full logits in float32; AdamW"


def measure(case: TrainingConfig, rows: Sequence[Row], session: Session) -> None:
    runs = [(row, TRAINERS[row.provider]) for row in rows]
    measure_training(case, runs, session.device, session.rounds(_ROUNDS))


def measure_training(
    config: TrainingConfig, runs: Sequence[tuple[Row, Provider]], device: str, rounds: int
) -> None:
    """Compare every trainer with the reference in a first step, then time steps in turns."""
    batch, exact = make_reference(config, device)
    for row, provider in runs:
        row.leave_out("absent", provider.absent(device))
        if row.runs:
            with attempt(row):
                row.errors = compare_steps(_first_step(provider, config, device, batch), exact)
                row.leave_out("wrong", why_wrong(row.errors, config.dtype))
    made: dict[str, list[Watch]] = {row.provider: [] for row, _ in runs}

    def seconds(pair: tuple[Row, Provider]) -> float:
        free(device)  # of the trainer before
        row, provider = pair
        steps = _steps(provider, config, device)
        made[row.provider].append(steps)
        return steps.seconds[-1]

    race([(pair[0], pair) for pair in runs], rounds, seconds)
    for row, _ in runs:
        if row.runs:
            _finish(row, made[row.provider])


def _steps(provider: Provider, config: TrainingConfig, device: str) -> Watch:
    """Take a step to warm up and a step to measure.

    Raises:
        ValueError: completions have another length, so trainers would have different work.
    """
    steps = training.train(provider, config, device, 2)
    length, expected = steps.logs[-1]["completions/mean_length"], config.completion_tokens
    if length != expected:
        raise ValueError(f"completions of {length} tokens; expected {expected}")
    return steps


def _finish(row: Row, made: Sequence[Watch]) -> None:
    """Add facts other than times."""
    generate = median(each.generate[-1] for each in made)
    train = median(each.seconds[-1] - each.generate[-1] for each in made)
    row.info |= {"generate_seconds": generate, "train_seconds": train}
    row.info |= {"train_bytes": max(each.train_peak for each in made)} if made[0].peak else {}
    # the loss of an on-policy step is 0 except for rounding; its gradient isn't
    norms = [each.logs[-1]["grad_norm"] for each in made]
    row.info["grad_norm"] = [norms[0], norms[-1]]
    row.cells = {
        "generate": text.duration(generate),
        "train": text.duration(train),
        "train: peak MiB": text.mib(row.info.get("train_bytes")),
        "gradient norm": f"{norms[0]:.3g} to {norms[-1]:.3g}",
    }


def make_reference(config: TrainingConfig, device: str) -> tuple[training.Batch, StepResult]:
    """Return a batch, and its loss and gradient from full fp32 logits of the original model."""
    model = training.make_model(config).to(device)
    batch = training.make_batch(config, model, device)
    tokens = TokenBatch.from_padded(
        batch["completion_ids"],
        batch["advantages"],
        old_logprobs=batch["old_per_token_logps"],
        num_items_in_batch=batch["num_items_in_batch"],
    )
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)

    def loss() -> Tensor:
        logprobs = training.logprobs_of(model, ids, config.prompt_tokens)
        return policy_loss(logprobs.flatten(), tokens, _LOSS).loss

    return batch, training.take_step((loss, [*model.parameters()]))


def _first_step(
    provider: Provider, config: TrainingConfig, device: str, batch: training.Batch
) -> StepResult:
    with patch.dict(vars(modeling_qwen2)):  # Liger replaces names of the model's module
        trainer = provider.run(config, device, 1)
        inputs = _our_inputs(batch) if is_ours(provider.name) else batch
        return training.take_step(training.step_of(trainer, inputs))


def _our_inputs(batch: training.Batch) -> Any:
    from grpo_trainer.data import Divisors, Sample, collate

    prompts, completions = batch["prompt_ids"], batch["completion_ids"]
    count = torch.tensor(float(completions.numel()), device=completions.device)
    pairs = zip(prompts.tolist(), completions.tolist(), strict=True)
    rollouts = [Sample("", prompt, "", completion) for prompt, completion in pairs]
    divisors = Divisors(num_items=count, num_tokens=count)
    inputs = collate(rollouts, batch["advantages"], divisors, pad_token_id=training.PAD)
    first = prompts.shape[1] - 1  # the position that predicts the first token
    inputs.old_logprobs = torch.zeros_like(inputs.target, dtype=torch.float32)
    inputs.old_logprobs[:, first : first + completions.shape[1]] = batch["old_per_token_logps"]
    return inputs


test_training = check_row
