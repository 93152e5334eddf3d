"""TRL's scoring function, replaced by ours, on a model that FSDP2 or ZeRO-3 has sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from grpo_kernels.integrations import trl as ours
from tests.parity.canned import VOCABULARY, tiny_model

STEPS, LEARNING_RATE = 3, 0.1


def cases() -> dict[str, Callable[[], None]]:
    return {"norm and head": check_fsdp}


def check_fsdp() -> None:
    """Compare all weights, after steps, with one process's that has all sequences."""
    expected, model = fused_model(), fused_model()
    train(expected, partial(one_process_loss, expected))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)
    train(model, partial(own_loss, model))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(
            weight.full_tensor(), expected.state_dict()[name], rtol=0, atol=2e-6, msg=name
        )


def zero_cases() -> dict[str, Callable[[], None]]:
    return {"ZeRO-3": check_zero}


def check_zero() -> None:
    """Compare all gradients in each step, as DeepSpeed gives them, with one process's."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    expected, model = fused_model(), fused_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # else at 1
        # small parameters would not be partitioned
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizers = [torch.optim.SGD(x.parameters(), lr=LEARNING_RATE) for x in (model, expected)]
    engine = deepspeed.initialize(model=model, optimizer=optimizers[0], config=config)[0]
    for step in range(STEPS):
        optimizers[1].zero_grad()
        one_process_loss(expected, step).backward()
        engine.backward(own_loss(engine, step))
        for (name, own), right in zip(model.named_parameters(), expected.parameters(), strict=True):
            error = (safe_get_full_grad(own) - right.grad).norm() / right.grad.norm()
            assert error < 5e-6, (step, name, error)
        engine.step()
        optimizers[1].step()
    engine.destroy()


def fused_model() -> Any:
    model = tiny_model()
    ours.add_fused_lm_head(model, 0.7, outputs=("log_probs", "entropy"))
    return model


def train(model: Any, loss_of: Callable[[int], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def own_loss(model: Any, step: int, rank: int | None = None) -> Tensor:
    """Return the loss of a rank's sequences."""
    g = torch.Generator().manual_seed(10 * step + (dist.get_rank() if rank is None else rank))
    ids = torch.randint(2, VOCABULARY, (3, 8), generator=g)
    labels = ids.masked_fill(torch.arange(8) < torch.tensor([[1], [4], [6]]), -100)
    found = model(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False)
    return (found.log_probs.sin() + 0.1 * found.entropy * found.label_mask).mean()


def one_process_loss(model: Any, step: int) -> Tensor:
    ranks = dist.get_world_size()
    return torch.stack([own_loss(model, step, rank) for rank in range(ranks)]).mean()
