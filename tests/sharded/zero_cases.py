"""Heads under DeepSpeed's ZeRO, on its CPU accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from grpo_kernels import linear_logprobs, linear_policy_loss
from grpo_kernels.testing import make_config
from tests.sharded.head_cases import TIED, VARIANTS, Gradients, check
from tests.sharded.ranks import Case, expect
from tests.sharded.training import (
    MICRO_BATCHES,
    STEPS,
    Tiny,
    Variant,
    loss_of,
    micro_batches,
)


def cases() -> dict[str, Case]:
    return dict(_cases())


def _cases() -> Iterator[tuple[str, Case]]:
    for stage in (1, 3):
        yield (
            f"FusedHead, stage {stage}",
            partial(check, partial(trained, stage), VARIANTS["FusedHead"]),
        )
    yield "tied", partial(check, partial(trained, 3), TIED)
    for name in ("a held weight", "frozen", "LoRA on the head"):
        yield name, partial(check, partial(trained, 3), VARIANTS[name])
    yield "outside of the engine's forward", check_outside


def engine_of(model: Tiny, stage: int) -> Any:
    import deepspeed

    # small parameters would not be partitioned
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_with(engine: Any, variant: Variant) -> Gradients:
    """Do what :func:`train` does, with DeepSpeed's engine."""
    from deepspeed.utils import safe_get_full_grad

    found, batches = [], list(micro_batches(dist.get_rank()))
    for step in range(STEPS):
        for ids, batch in batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]:
            loss = loss_of(engine, engine.module, ids, variant, batch)
            engine.backward(loss, scale_wrt_gas=False)  # the batch knows of its window
            if engine.is_gradient_accumulation_boundary():
                named = engine.module.named_parameters()
                trained = {name: x for name, x in named if x.requires_grad}
                found.append({n: safe_get_full_grad(x).clone() for n, x in trained.items()})
            engine.step()
    return found


def trained(stage: int, model: Tiny, variant: Variant) -> Gradients:
    engine = engine_of(model, stage)
    found = train_with(engine, variant)
    engine.destroy()
    return found


def check_outside() -> None:
    model = Tiny()
    engine = engine_of(model, 3)
    ids, batch = next(micro_batches(0))
    hidden = torch.randn(*ids[:, 1:].shape, model.lm_head.in_features)
    weight, target = model.lm_head.weight, ids[:, 1:]
    message = "FusedHead"
    expect(message, lambda: linear_policy_loss(hidden, weight, batch, make_config("dapo")))
    expect(message, lambda: linear_logprobs(hidden, weight, target))
    expect("ZeRO-3", lambda: linear_logprobs(hidden, weight.data, target))
    expect("add_fused_head", lambda: model.lm_head(hidden, target))
    with torch.no_grad():
        assert model.lm_head(hidden, target).logprobs.shape == target.shape
    engine.destroy()
