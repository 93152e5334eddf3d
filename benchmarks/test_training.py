"""A GRPO step of a small model with a real head: our trainer beside TRL's, generation included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.models.qwen2 import modeling_qwen2

from benchmarks import text, training
from benchmarks.check import StepResult, compare_steps, why_wrong
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt, free, race
from benchmarks.providers.base import Provider, is_ours
from benchmarks.results import Row
from benchmarks.training import TrainingConfig
from grpo_kernels import LossConfig, TokenBatch, policy_loss

_ROUNDS = 5  # steps, after one to warm up
_LOSS = LossConfig(loss_type="dapo", epsilon=0.2)
CASES = {
    "tiny": [training.sized("tiny", DEVICE)],
    "quick": [training.sized("quick", DEVICE)],
    "cpu": [training.SIZES["full"]],
    "gpu": [training.sized("full-gpu", DEVICE)],
    "gpu-full": [training.sized("full-gpu", DEVICE)],
}


_BODY = "Liger's norms, rotary embedding and MLP in the body"  # off the head in both


def _trainer(name: str, note: str, package: str, liger: bool = False) -> Provider:
    """Return one whose ``run`` builds the trainer, for a size, a device and a number of steps."""
    requires = [*["trl"] * (package == "trl"), *["liger-kernel"] * liger]
    return Provider(
        name=name,
        note=note,
        run=partial(training.build, package, **{"use_liger_kernel": True} if liger else {}),
        packages=("transformers", "accelerate", "datasets", *requires),
        gpu=liger,
    )


PROVIDERS = (
    _trainer("ours", "grpo_trainer.GRPOTrainer", "grpo_trainer"),
    _trainer("ours-liger", f"the same with {_BODY}", "grpo_trainer", liger=True),
    _trainer("trl", "trl.GRPOTrainer, its chunked head", "trl"),
    _trainer("trl-liger", f"the same with use_liger_kernel: {_BODY}", "trl", liger=True),
)


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


def names(case: TrainingConfig) -> list[str]:
    return [provider.name for provider in PROVIDERS]


def measure(case: TrainingConfig, names: Sequence[str], session: Session) -> list[Row]:
    providers = [provider for provider in PROVIDERS if provider.name in names]
    return measure_training(case, providers, session.device, session.rounds(_ROUNDS))


def about(case: TrainingConfig, device: str) -> str:
    return "errors against full logits in float32; AdamW"


def measure_training(
    config: TrainingConfig, providers: Sequence[Provider], device: str, rounds: int
) -> list[Row]:
    """Compare every trainer with the reference in a first step, then time steps in turns."""
    rows = [Row(provider.name, provider.note) for provider in providers]
    batch, exact = make_reference(config, device)
    runs: list[tuple[Row, Provider]] = []
    for row, provider in zip(rows, providers, strict=True):
        row.leave_out("absent", provider.absent(device))
        if row.runs:
            with attempt(row):
                row.errors = compare_steps(_first_step(provider, config, device, batch), exact)
                row.leave_out("wrong", why_wrong(row.errors, config.dtype))
                runs.append((row, provider))
    made: dict[str, list[Training]] = {}

    def seconds(provider: Provider) -> float:
        free(device)  # of the trainer before
        steps = Training(provider, config, device)
        made.setdefault(provider.name, []).append(steps)
        return steps.seconds

    race(runs, rounds, seconds)
    for row in rows:
        if row.runs:
            _finish(row, made[row.provider])
    return rows


def _finish(row: Row, made: Sequence[Training]) -> None:
    """Add what is known beside times."""
    generate = row.info["generate_seconds"] = median(each.generate for each in made)
    train = row.info["train_seconds"] = median(each.seconds - each.generate for each in made)
    row.info |= {"train_bytes": max(each.peak for each in made)} if made[0].peak else {}
    # the loss of an on-policy step is 0 but for rounding; its gradient is not
    norms = [each.logs["grad_norm"] for each in made]
    row.info["grad_norm"] = [norms[0], norms[-1]]
    row.cells = {
        "generate": text.duration(generate),
        "train": text.duration(train),
        "train: peak MiB": text.mib(row.info.get("train_bytes")),
        "gradient norm": f"{norms[0]:.3g} to {norms[-1]:.3g}",
    }


def make_reference(config: TrainingConfig, device: str) -> tuple[training.Batch, StepResult]:
    """Return a batch, and its loss and gradient in fp32: full logits of the untouched model."""
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


class Training(TrainerCallback):
    """A trainer that was built and has taken a step to warm up and one that is measured.

    It is built anew for every round, so that trainers can take turns while each runs its real loop.

    Raises:
        ValueError: completions are not of the length that makes all trainers' work the same.
    """

    seconds = generate = 0.0  # of a step with its logging, and what of it is rollout and scoring
    peak = 0  # bytes of the GPU that the rest of the step needs above what was there

    def __init__(self, provider: Provider, config: TrainingConfig, device: str) -> None:
        self._cuda = device == "cuda"
        with patch.dict(vars(modeling_qwen2)):
            trainer = provider.run(config, device, 2)
            trainer.add_callback(self)
            # generates at a step's first call
            self._prepare, trainer._prepare_inputs = trainer._prepare_inputs, self._timed_inputs
            trainer.train()
        del self._prepare  # it holds the trainer's memory
        length, wanted = self.logs["completions/mean_length"], config.completion_tokens
        if length != wanted:
            raise ValueError(f"completions of {length} tokens; expected {wanted}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(state.global_step)  # all trainers sample alike
        self._start, self.generate = self._clock(), 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "grad_norm" in logs:  # not that of the end
            self.seconds, self.logs = self._clock() - self._start, dict(logs)
            if self._cuda:
                self.peak = torch.cuda.max_memory_allocated() - self._before

    def _timed_inputs(self, inputs: Any) -> Any:
        start, first = self._clock(), self.generate == 0.0
        prepared = self._prepare(inputs)
        self.generate += self._clock() - start
        if self._cuda and first:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return prepared

    def _clock(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def test_training(row: Row) -> None:
    """Time a whole training step, ours beside TRL's."""
    assert row.seconds
