"""The trainers that are compared, with the same settings; and one batch for all."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.check import StepResult, take_gradient
from benchmarks.providers.base import lacking
from benchmarks.training.task import (
    FIRST_WORD,
    PAD,
    SEED,
    TrainingConfig,
    make_dataset,
    make_model,
    make_tokenizer,
    reward,
)
from grpo_kernels import LossConfig, TokenBatch, policy_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

_LOSS = LossConfig(loss_type="dapo", epsilon=0.2)
_NOISE = 0.1  # of the old log-probabilities: no ratio comes near its bound, where rounding decides
Batch = dict[str, Tensor]  # a prepared micro-batch, as TRL's ``compute_loss`` takes it


def precision(device: str) -> str:
    """Return fp32, or bf16 autocast over fp32 weights where the GPU has it."""
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a trainer is built for."""

    config: TrainingConfig
    device: str  # "cpu" | "cuda"
    steps: int  # that the data suffices for
    folder: Path

    @property
    def dtype(self) -> str:
        return precision(self.device)


@dataclass(frozen=True, kw_only=True)
class TrainerProvider:
    """One trainer."""

    name: str
    note: str  # what exactly is run
    requires: tuple[str, ...]  # distributions
    build: Callable[[Job], Trainer]
    inputs: Callable[[Batch], Any]  # what its ``compute_loss`` takes
    needs_gpu: bool = False

    def absent(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        needs_gpu = self.needs_gpu and device != "cuda"
        return lacking(*self.requires) or ("needs a GPU" if needs_gpu else None)


def _settings(job: Job) -> dict[str, Any]:
    """Return the arguments that our configuration and TRL's have in common."""
    config = job.config
    return {
        "output_dir": tempfile.mkdtemp(dir=job.folder),  # which belongs to one run
        "use_cpu": job.device == "cpu",
        "bf16": job.dtype == "bf16",
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        "learning_rate": 1e-6,
        "max_steps": job.steps,
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.micro_batches,
        "num_generations": config.group,
        "max_completion_length": config.completion_tokens,
        # no completion ends early
        "generation_kwargs": {"min_new_tokens": config.completion_tokens},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "num_iterations": 1,
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "logging_steps": 1,  # whose cost belongs to a step
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": SEED,
    }


def build(
    package: str, job: Job, trainer: Any = None, peft_config: Any = None, **changes: Any
) -> Trainer:
    """Build the GRPOTrainer of a package, with other values for some of the settings.

    ``trainer``: a class that stands for it.
    """
    from transformers import PrinterCallback

    library = importlib.import_module(package)
    args = library.GRPOConfig(**{**_settings(job), **changes})
    built = (trainer or library.GRPOTrainer)(
        peft_config=peft_config,
        model=make_model(job.config),
        reward_funcs=reward,
        args=args,
        train_dataset=make_dataset(job.config, job.steps),
        processing_class=make_tokenizer(job.config),
    )
    built.remove_callback(PrinterCallback)
    return built


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


def _provider(
    name: str,
    note: str,
    package: str,
    inputs: Callable[[Batch], Any] = dict,
    liger: bool = False,
) -> TrainerProvider:
    requires = [each for each in (package, *_COMMON) if each != "grpo_trainer"]
    return TrainerProvider(
        name=name,
        note=note,
        requires=("liger-kernel", *requires) if liger else tuple(requires),
        build=partial(build, package, use_liger_kernel=True) if liger else partial(build, package),
        inputs=inputs,
        needs_gpu=liger,
    )


def make_reference(config: TrainingConfig, device: str) -> tuple[Batch, StepResult]:
    """Return a batch, and its loss and gradient in fp32: full logits of the untouched model."""
    model = make_model(config).to(device)
    batch = make_batch(config, model, device)
    loss = torch.zeros((), device=device)
    for row in range(config.micro_batch):  # full logits of one sequence at a time
        part = _row_loss(model, batch, slice(row, row + 1))
        part.backward()
        loss += part.detach()
    return batch, (loss, take_gradient(model.parameters()))


def make_batch(config: TrainingConfig, model: PreTrainedModel, device: str) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    rows, prompt = config.micro_batch, config.prompt_tokens
    shape = rows, prompt + config.completion_tokens
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator).to(device)
    prompts, completions = ids[:, :prompt], ids[:, prompt:]
    with torch.no_grad():
        logprobs = torch.cat([_logprobs(model, row, prompt) for row in ids.split(1)])
    noise = (2 * torch.rand(logprobs.shape, generator=generator) - 1) * _NOISE
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-0.7, 1.7, rows, device=device),  # no mean of 0: no loss of 0
        "old_per_token_logps": logprobs + noise.to(device),
        "num_items_in_batch": torch.tensor(float(config.tokens), device=device),  # of the step
    }


def _row_loss(model: PreTrainedModel, batch: Batch, row: slice) -> Tensor:
    """Return one sequence's contribution to the loss."""
    prompt, completion = batch["prompt_ids"][row], batch["completion_ids"][row]
    logprobs = _logprobs(model, torch.cat([prompt, completion], dim=1), prompt.shape[1])
    tokens = TokenBatch.from_padded(
        completion,
        batch["advantages"][row],
        old_logprobs=batch["old_per_token_logps"][row],
        num_items_in_batch=batch["num_items_in_batch"],
    )
    return policy_loss(logprobs.flatten(), tokens, _LOSS).loss


def _logprobs(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:  # (1, L) -> (1, C)
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)


_COMMON = ("transformers", "accelerate", "datasets")
# both trainers keep Liger off the head
PROVIDERS = (
    _provider("ours", "grpo_trainer.GRPOTrainer", "grpo_trainer", _our_inputs),
    _provider(
        "ours-liger",
        "the same with Liger's norms, rotary embedding and MLP in the body",
        "grpo_trainer",
        _our_inputs,
        liger=True,
    ),
    _provider("trl", "trl.GRPOTrainer, its chunked head", "trl"),
    _provider(
        "trl-liger",
        "the same with use_liger_kernel: Liger's norms, rotary embedding and MLP in the body",
        "trl",
        liger=True,
    ),
)
