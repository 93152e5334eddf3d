"""The trainers that are compared, with the same settings."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.providers.base import needs_gpu
from benchmarks.providers.baselines import lacking
from benchmarks.training.batch import SharedBatch
from benchmarks.training.task import (
    PAD,
    SEED,
    TrainingConfig,
    make_dataset,
    make_model,
    make_tokenizer,
    reward,
)

if TYPE_CHECKING:
    from transformers import Trainer


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
    inputs: Callable[[SharedBatch], Any]  # what its ``compute_loss`` takes
    needs_gpu: bool = False

    def absent(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        return lacking(*self.requires) or (needs_gpu(device) if self.needs_gpu else None)


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


def _our_inputs(batch: SharedBatch) -> Any:
    from grpo_trainer.data import Rollout, collate

    tokens = batch.num_items / batch.micro_batches
    count = torch.tensor(tokens, device=batch.advantages.device)
    completion_tokens = batch.completion_ids.shape[1]
    pairs = zip(batch.prompt_ids.tolist(), batch.completion_ids.tolist(), strict=True)
    rollouts = [Rollout("", prompt, "", completion) for prompt, completion in pairs]
    inputs = collate(rollouts, batch.advantages, count, count, pad_token_id=PAD)
    first = batch.prompt_ids.shape[1] - 1  # the position that predicts the first token
    inputs.old_logprobs = torch.zeros_like(inputs.target, dtype=torch.float32)
    inputs.old_logprobs[:, first : first + completion_tokens] = batch.old_logprobs
    return inputs


def trl_inputs(batch: SharedBatch) -> Any:
    return {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": torch.ones_like(batch.prompt_ids),
        "completion_ids": batch.completion_ids,
        "completion_mask": torch.ones_like(batch.completion_ids),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "num_items_in_batch": torch.tensor(batch.num_items, device=batch.advantages.device),
    }


_COMMON = ("transformers", "accelerate", "datasets")
# both trainers keep Liger off the head
OURS = TrainerProvider(
    name="ours",
    note="grpo_trainer.GRPOTrainer",
    requires=_COMMON,
    build=partial(build, "grpo_trainer"),
    inputs=_our_inputs,
)
OURS_LIGER = TrainerProvider(
    name="ours-liger",
    note="the same with Liger's norms, rotary embedding and MLP in the body",
    requires=("liger-kernel", *_COMMON),
    needs_gpu=True,
    build=partial(build, "grpo_trainer", use_liger_kernel=True),
    inputs=_our_inputs,
)
TRL = TrainerProvider(
    name="trl",
    note="trl.GRPOTrainer, its chunked head",
    requires=("trl", *_COMMON),
    build=partial(build, "trl"),
    inputs=trl_inputs,
)
TRL_LIGER = TrainerProvider(
    name="trl-liger",
    note="the same with use_liger_kernel: Liger's norms, rotary embedding and MLP in the body",
    requires=("trl", "liger-kernel", *_COMMON),
    needs_gpu=True,
    build=partial(build, "trl", use_liger_kernel=True),
    inputs=trl_inputs,
)
PROVIDERS = (OURS, OURS_LIGER, TRL, TRL_LIGER)
