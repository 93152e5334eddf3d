"""TRL's trainers on a model whose weights are trained, or LoRA adapters of its layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.hosts.work import ARMS, AT_HEAD, NO_HEAD, OURS, HostWork, Step
from benchmarks.training.batch import make_batch
from benchmarks.training.providers import Job, build, trl_inputs
from benchmarks.training.task import SEED, TrainingConfig, make_model, make_tokenizer
from grpo_kernels.linear_logprobs import LinearLogprobs


def _make_step(kind: str, lora: bool, arm: str, config: TrainingConfig) -> Step:
    """Build the trainer of an arm; return its forward and backward of one batch."""
    from grpo_kernels.integrations import trl as ours

    # what is built while it is on keeps our head
    with ours.enabled() if arm in (OURS, NO_HEAD) else nullcontext():
        torch.manual_seed(SEED)  # of the adapters
        trainer, inputs = _TRAINERS[kind](lora, arm, config)

    def loss() -> Tensor:
        with _headless() if arm == NO_HEAD else nullcontext():
            return trainer.compute_loss(trainer.model_wrapped, dict(inputs))

    return Step(loss, [x for x in trainer.model.parameters() if x.requires_grad])


@contextmanager
def _headless() -> Iterator[None]:
    """Put something that costs nothing in the place of the head's GEMMs: the rest of a step."""

    def cheap(hidden: Tensor, head: Any, target: Tensor, **options: Any) -> LinearLogprobs:
        value = hidden.float().mean(-1)
        found: dict[str, Any] = dict.fromkeys(LinearLogprobs._fields)
        for name in options["outputs"]:
            detached = value.detach() > 0 if name == "is_top1" else value.detach()
            found[name] = value if name in ("logprobs", "entropy") else detached
        return LinearLogprobs(**found)

    with patch("grpo_kernels.integrations.trl.linear_logprobs", cheap):
        yield


def _grpo(lora: bool, arm: str, config: TrainingConfig) -> tuple[Any, dict[str, Any]]:
    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        job = Job(config=config, device="cpu", steps=1, folder=Path(folder))
        own = FusedGRPOTrainer if arm == AT_HEAD else None
        trainer: Any = build("trl", job, own, _adapter(lora))
    trainer.current_gradient_accumulation_steps = config.micro_batches
    return trainer, trl_inputs(make_batch(config, make_model(config), "cpu"))


def _texts(config: TrainingConfig, length: int, seed: int) -> list[str]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, config.vocabulary, (config.micro_batch, length), generator=g)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def _from_dataset(
    trainer: str, columns: dict[str, int], lora: bool, arm: str, config: TrainingConfig
) -> tuple[Any, dict[str, Any]]:
    """Build a trainer and take its first batch."""
    import trl
    from datasets import Dataset

    data = {name: _texts(config, length, i) for i, (name, length) in enumerate(columns.items())}
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(trl, f"{trainer}Config")(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=1,
            per_device_train_batch_size=config.micro_batch, report_to="none", save_strategy="no",
        )  # fmt: skip
        model = make_model(config)
        model.save_pretrained(folder)  # a reference model is loaded from there
        model = type(model).from_pretrained(folder)
        built: Any = getattr(trl, f"{trainer}Trainer")(
            model, args=args, train_dataset=Dataset.from_dict(data), peft_config=_adapter(lora),
            processing_class=make_tokenizer(config),
        )  # fmt: skip
    return built, built._prepare_inputs(next(iter(built.get_train_dataloader())))


def _adapter(lora: bool) -> Any:
    if not lora:
        return None
    from peft import LoraConfig

    # both factors have gradients
    return LoraConfig(target_modules=["q_proj", "v_proj"], r=8, init_lora_weights=False)


_TRAINERS: dict[str, Callable[[bool, str, TrainingConfig], tuple[Any, dict[str, Any]]]] = {
    "GRPO": _grpo,
    "SFT": partial(_from_dataset, "SFT", {"prompt": 32, "completion": 64}),
    "DPO": partial(_from_dataset, "DPO", {"prompt": 32, "chosen": 64, "rejected": 64}),
}

WORKS = tuple(
    HostWork(
        "trl",
        f"{kind}Trainer, {'LoRA' if lora else 'all weights'}",
        ARMS if kind == "GRPO" else tuple(arm for arm in ARMS if arm != AT_HEAD),
        partial(_make_step, kind, lora),
    )
    for kind in _TRAINERS
    for lora in (False, True)
)
