"""Fields of transformers' TrainingArguments that GRPOConfig does not take as they are."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_trainer.config.checks import check_choice


def check_inherited(args: TrainingArguments) -> None:
    """Raise ValueError if one is set that cannot work here, and warn of one without effect."""
    _check_trackers(args)
    _check_loading(args)
    _check_what_trainer_would_ignore(args)


def check_accelerator(args: TrainingArguments) -> None:
    """Raise ValueError if accelerate has no such setting."""
    given = args.accelerator_config
    known = [item.name for item in fields(AcceleratorConfig)]
    for name in given if isinstance(given, dict) else ():
        check_choice("accelerator_config", name, known)


def leave_the_head_to_us(args: TrainingArguments) -> None:
    """Keep Liger from patching the head, whose forward computes our loss."""
    if not args.use_liger_kernel:
        return
    patches: dict[str, Any] = dict(args.liger_kernel_config or {})
    for name in ("fused_linear_cross_entropy", "cross_entropy"):
        if patches.setdefault(name, False):
            raise ValueError(
                f"liger_kernel_config[{name!r}]: expected False, got True: the loss of this "
                "trainer is fused already"
            )
    args.liger_kernel_config = patches


def _check_loading(args: TrainingArguments) -> None:
    """Check settings of loaders, which do not read the training prompts: each process does."""
    reasons = {
        "dispatch_batches": "the main process can send tensors alone, and prompts are none",
        "split_batches": "batch sizes are those of one process",
    }
    for name, reason in reasons.items():
        if getattr(args.accelerator_config, name):
            raise ValueError(f"accelerator_config: expected {name}=False ({reason}), got True")
    if args.dataloader_num_workers:
        warnings.warn(
            "dataloader_num_workers: no effect on training, whose prompts each process reads "
            "itself when it needs them; evaluation has these workers",
            stacklevel=5,
        )


def _check_what_trainer_would_ignore(args: TrainingArguments) -> None:
    """Check arguments of transformers' Trainer that have no meaning here."""
    reasons = {
        "auto_find_batch_size": (False, "a smaller batch would split groups"),
        "label_smoothing_factor": (0.0, "there are no labels"),
        "parallelism_config": (None, "each process has the whole model and whole sequences"),
        "train_sampling_strategy": ("random", "prompts are sampled in groups"),
    }
    for name, (expected, reason) in reasons.items():
        value = getattr(args, name, expected)
        if value != expected:
            raise ValueError(f"{name}: expected {expected!r} ({reason}), got {value!r}")


def _check_trackers(args: TrainingArguments) -> None:
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    for tracker in trackers:
        check_choice("report_to", tracker, INTEGRATION_TO_CALLBACK)
    installed = get_available_reporting_integrations()
    missing = sorted(set(trackers) - set(installed))
    if missing:
        raise ValueError(
            f"report_to: expected trackers that are installed ({', '.join(installed) or 'none'}), "
            f"got {', '.join(missing)}; pip install {' '.join(missing)}"
        )
