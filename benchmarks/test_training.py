"""A GRPO step of a small model with a real head: our trainer beside TRL's, generation included."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback
from transformers.models.qwen2 import modeling_qwen2

from benchmarks import text
from benchmarks.check import StepResult, compare_steps, take_gradient, why_wrong
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt, race
from benchmarks.providers.base import lacking
from benchmarks.results import Row
from benchmarks.training import (
    PAD,
    SIZES,
    Batch,
    TrainingConfig,
    build,
    logprobs_of,
    make_batch,
    make_model,
    sized,
)
from grpo_kernels import LossConfig, TokenBatch, policy_loss

if TYPE_CHECKING:
    from transformers import Trainer

_ROUNDS = 5  # steps, after one to warm up
_LOSS = LossConfig(loss_type="dapo", epsilon=0.2)
CASES = {
    "tiny": [sized("tiny", DEVICE)],
    "quick": [sized("quick", DEVICE)],
    "cpu": [SIZES["full"]],
    "gpu": [sized("full-gpu", DEVICE)],
    "gpu-full": [sized("full-gpu", DEVICE)],
}


@dataclass(frozen=True)
class TrainerProvider:
    """One trainer."""

    name: str
    note: str  # what exactly is run
    package: str
    liger: bool = False  # its norms, rotary embedding and MLP in the body; off the head in both

    def absent(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        requires = ["transformers", "accelerate", "datasets", *["liger-kernel"] * self.liger]
        if self.package != "grpo_trainer":
            requires.append(self.package)
        return lacking(*requires) or ("needs a GPU" if self.liger and device != "cuda" else None)

    def build(self, config: TrainingConfig, device: str, steps: int) -> Trainer:
        liger = {"use_liger_kernel": True} if self.liger else {}
        return build(self.package, config, device, steps, **liger)

    def inputs(self, batch: Batch) -> Any:
        """Return what its ``compute_loss`` takes."""
        return _our_inputs(batch) if self.package == "grpo_trainer" else dict(batch)


_BODY = "Liger's norms, rotary embedding and MLP in the body"
PROVIDERS = (
    TrainerProvider("ours", "grpo_trainer.GRPOTrainer", "grpo_trainer"),
    TrainerProvider("ours-liger", f"the same with {_BODY}", "grpo_trainer", liger=True),
    TrainerProvider("trl", "trl.GRPOTrainer, its chunked head", "trl"),
    TrainerProvider("trl-liger", f"the same with use_liger_kernel: {_BODY}", "trl", liger=True),
)


def _our_inputs(batch: Batch) -> Any:
    from grpo_trainer.data import Rollout, collate

    prompts, completions = batch["prompt_ids"], batch["completion_ids"]
    count = torch.tensor(float(completions.numel()), device=completions.device)
    pairs = zip(prompts.tolist(), completions.tolist(), strict=True)
    rollouts = [Rollout("", prompt, "", completion) for prompt, completion in pairs]
    inputs = collate(rollouts, batch["advantages"], count, count, pad_token_id=PAD)
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
    config: TrainingConfig, providers: Sequence[TrainerProvider], device: str, rounds: int
) -> list[Row]:
    """Measure steps of every trainer, in turns.

    Each is first compared with the reference at its initial weights, and warmed up by a step.
    """
    rows = [Row(provider.name, provider.note) for provider in providers]
    made: list[tuple[Row, PausedTraining]] = []
    try:
        batch, exact = make_reference(config, device)
        for row, provider in zip(rows, providers, strict=True):
            row.leave_out("absent", provider.absent(device))
            if row.runs:
                with attempt(row):
                    training = PausedTraining(provider, config, device, rounds + 2)
                    made.append((row, training))
                    row.errors = compare_steps(training.compute(batch), exact)
                    row.leave_out("wrong", why_wrong(row.errors, config.dtype))
        del batch, exact
        for row, training in made:
            if row.runs:
                with attempt(row):
                    training.step()
        race(made, rounds, PausedTraining.step)
        for row, training in made:
            if row.runs:
                _finish(row, training, config)
    finally:
        for _, training in made:
            training.close()
    return rows


def _finish(row: Row, training: PausedTraining, config: TrainingConfig) -> None:
    """Add what is known beside times, of the steps after the warm-up."""
    logs = [x for x in training.trainer.state.log_history if "grad_norm" in x][1:]
    lengths = [logged["completions/mean_length"] for logged in logs]
    if lengths != [float(config.completion_tokens)] * len(row.seconds):  # not the others' work
        reason = f"completions of {lengths} tokens; expected {config.completion_tokens}"
        row.leave_out("wrong", reason)
        return
    row.info["generate_seconds"] = median(training.generate[1:])
    row.info["train_seconds"] = median(training.train[1:])
    row.info |= {"train_bytes": max(training.memory[1:])} if training.memory else {}
    # the loss of an on-policy step is 0 but for rounding; its gradient is not
    norms = row.info["grad_norm"] = [logs[0]["grad_norm"], logs[-1]["grad_norm"]]
    row.cells = {
        "generate": text.duration(row.info["generate_seconds"]),
        "train": text.duration(row.info["train_seconds"]),
        "train: peak MiB": text.mib(row.info.get("train_bytes")),
        "gradient norm": f"{norms[0]:.3g} to {norms[1]:.3g}",
    }


def make_reference(config: TrainingConfig, device: str) -> tuple[Batch, StepResult]:
    """Return a batch, and its loss and gradient in fp32: full logits of the untouched model."""
    model = make_model(config).to(device)
    batch = make_batch(config, model, device)
    loss = torch.zeros((), device=device)
    for row in range(config.micro_batch):  # full logits of one sequence at a time
        one = {name: x[row : row + 1] if x.dim() else x for name, x in batch.items()}
        ids = torch.cat([one["prompt_ids"], one["completion_ids"]], dim=1)
        tokens = TokenBatch.from_padded(
            one["completion_ids"],
            one["advantages"],
            old_logprobs=one["old_per_token_logps"],
            num_items_in_batch=one["num_items_in_batch"],
        )
        logprobs = logprobs_of(model, ids, config.prompt_tokens)
        part = policy_loss(logprobs.flatten(), tokens, _LOSS).loss
        part.backward()
        loss += part.detach()
    return batch, (loss, take_gradient(model.parameters()))


class PausedTraining(TrainerCallback):
    """``trainer.train()``, halted at the start of every optimisation step.

    The call lives on a thread of its own, so that several trainers can take turns while each runs
    its real loop: a second ``train()`` would wrap the model again, and a copy of the loop would
    measure the copy. Only one thread runs at any time. More steps must be allowed than are taken.

    Raises (in the constructor and in ``step``): whatever ``train()`` raises.
    """

    def __init__(self, provider: TrainerProvider, config: TrainingConfig, device: str, steps: int):
        self._cuda = device == "cuda"
        self._provider = provider
        self._turn = threading.Barrier(2)  # met at each halt and start; broken at the end
        self._error: BaseException | None = None
        # the names of the model's module, which Liger replaces: other trainers keep their own
        self._names: dict[str, Any] = {}
        self.generate: list[float] = []  # seconds of rollout and scoring, by step
        self.train: list[float] = []  # of the rest: forward, backward, optimiser and logging
        self.memory: list[int] = []  # bytes of the GPU that the rest needed above what was there
        with self._own_names():
            self.trainer = provider.build(config, device, steps)
            self.trainer.add_callback(self)
            self._prepare_inputs = self.trainer._prepare_inputs
            self.trainer._prepare_inputs = self._timed_inputs  # generates at a step's first call
            self._thread = threading.Thread(target=self._train, daemon=True)
            self._thread.start()
            self._meet()

    def compute(self, batch: Batch) -> StepResult:
        """Return the loss and the gradient of a batch."""
        with self._own_names():
            with self.trainer.compute_loss_context_manager():
                inputs = self._provider.inputs(batch)
                loss = self.trainer.compute_loss(self.trainer.model_wrapped, inputs)
            loss.backward()
        return loss.detach(), take_gradient(self.trainer.model.parameters())

    def step(self) -> float:
        """Run to the start of the next step; return the seconds."""
        torch.manual_seed(len(self.train))  # all trainers sample alike
        self._seconds, self._before = 0.0, 0
        with self._own_names():
            start = self._clock()
            self._meet()
            self._meet()
            seconds = self._clock() - start
        self.generate.append(self._seconds)
        self.train.append(seconds - self._seconds)
        if self._cuda:
            self.memory.append(torch.cuda.max_memory_allocated() - self._before)
        return seconds

    def close(self) -> None:
        """End ``train()`` where it stands."""
        self._turn.abort()
        self._thread.join()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._turn.wait()
        self._turn.wait()

    def _train(self) -> None:
        try:
            self.trainer.train()
            self._error = RuntimeError("train() ended before the last measured step")
        except BaseException as error:  # raised again where the step was asked for
            self._error = error
        self._turn.abort()

    def _meet(self) -> None:
        try:
            self._turn.wait()
        except threading.BrokenBarrierError:
            error, self._error = self._error, None  # it holds the memory of its stack
            assert error is not None
            raise error from None

    def _timed_inputs(self, inputs: Any) -> Any:
        start, first = self._clock(), self._seconds == 0.0
        prepared = self._prepare_inputs(inputs)
        self._seconds += self._clock() - start
        if self._cuda and first:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return prepared

    def _clock(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        with patch.dict(vars(modeling_qwen2), self._names):
            yield
            self._names = dict(vars(modeling_qwen2))


def test_training(row: Row) -> None:
    """Time a whole training step, ours beside TRL's."""
    assert row.seconds
