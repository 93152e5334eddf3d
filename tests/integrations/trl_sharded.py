"""TRL's scoring function, replaced by ours, on a model that FSDP2 or ZeRO-3 has sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.models.utils import _ForwardRedirection

from grpo_kernels.integrations import trl as ours
from tests.parity.canned import VOCABULARY, tiny_model

STEPS, LEARNING_RATE = 3, 0.1


def cases() -> dict[str, Callable[[], None]]:
    return {
        "norm and head": check_fsdp,
        "distillation": check_distillation,
        "distillation, separate heads": partial(check_distillation, separate=True),
    }


def zero_cases() -> dict[str, Callable[[], None]]:
    return {"ZeRO-3": check_zero, "ZeRO-3, distillation": check_zero_distillation}


def check_fsdp() -> None:
    """Compare all weights, after steps, with one process's that has all sequences."""
    expected, model = fused_model(), fused_model()
    train(expected, mean_over_ranks(partial(score_loss, expected)))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)
    train(model, partial(score_loss, model))
    compare_weights(model, expected)


def check_distillation(separate: bool = False) -> None:
    """Compare weights as before, of a student whose teacher is sharded, too."""
    expected, model, teacher = tiny_model(), tiny_model(), other_model()
    train(expected, mean_over_ranks(partial(divergence, expected, expected, other_model())))
    for sharded in (model, teacher):
        for layer in [*sharded.model.layers, *([sharded.lm_head] if separate else [])]:
            fully_shard(layer)
        fully_shard(sharded)
    train(model, partial(divergence, model, model, teacher))
    compare_weights(model, expected)


def compare_weights(model: Any, expected: Any) -> None:
    weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    torch.testing.assert_close(weights, dict(expected.state_dict()), rtol=0, atol=2e-6)


def check_zero() -> None:
    """Compare all gradients in each step, as DeepSpeed gives them, with one process's."""
    expected, model = fused_model(), fused_model()
    engine = zero_engine(model)
    right = mean_over_ranks(partial(score_loss, expected))
    compare_gradients(engine, expected, partial(score_loss, engine), right)


def check_zero_distillation() -> None:
    """Compare gradients as before, of a student whose teacher is partitioned, too."""
    expected, model, teacher = tiny_model(), tiny_model(), other_model()
    right = mean_over_ranks(partial(divergence, expected, expected, other_model()))
    engine = zero_engine(model)
    engine_of_teacher = zero_engine(teacher, trained=False)

    def own(step: int) -> Tensor:
        on = HfDeepSpeedConfig(ZERO)  # as TRL asks for it, while this object is there
        assert on.is_zero3()
        return divergence(engine, model, engine_of_teacher, step)

    def right_without_zero3(step: int) -> Tensor:
        unset_hf_deepspeed_config()  # one of an earlier case may still be there
        return right(step)

    compare_gradients(engine, expected, own, right_without_zero3)
    engine_of_teacher.destroy()


ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,  # else at 1
    # small parameters would not be partitioned
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


def zero_engine(model: Any, trained: bool = True) -> Any:
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) if trained else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO)[0]


def compare_gradients(engine: Any, expected: Any, own: Any, right: Any) -> None:
    from deepspeed.utils import safe_get_full_grad

    optimizer = torch.optim.SGD(expected.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        right(step).backward()
        engine.backward(own(step))
        pairs = zip(engine.module.named_parameters(), expected.parameters(), strict=True)
        for (name, found), exact in pairs:
            error = (safe_get_full_grad(found) - exact.grad).norm() / exact.grad.norm()
            assert error < 5e-6, (step, name, error)
        engine.step()
        optimizer.step()
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


def mean_over_ranks(loss_of: Callable[..., Tensor]) -> Callable[[int], Tensor]:
    """Return a step's loss on one process that has the sequences of all ranks."""
    ranks = range(dist.get_world_size())
    return lambda step: torch.stack([loss_of(step, rank) for rank in ranks]).mean()


def sequences(step: int, rank: int | None) -> Tensor:
    g = torch.Generator().manual_seed(10 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(2, VOCABULARY, (3, 8), generator=g)


def score_loss(model: Any, step: int, rank: int | None = None) -> Tensor:
    """Return the loss of a rank's sequences."""
    ids = sequences(step, rank)
    labels = ids.masked_fill(torch.arange(8) < torch.tensor([[1], [4], [6]]), -100)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False)
    return (output.log_probs.sin() + 0.1 * output.entropy * output.label_mask).mean()


def other_model() -> Any:
    """Return a teacher whose distribution is another one."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    return model


def divergence(
    wrapped: Any, model: Any, teacher: Any, step: int, rank: int | None = None
) -> Tensor:
    """Return a rank's loss as TRL's trainer has it: within the forwards of what wraps models."""
    ids = sequences(step, rank)
    mask = torch.arange(8) < torch.tensor([[8], [4], [6]])

    def hidden(model: Any) -> Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    def loss_of(model: Any) -> tuple[Tensor, ...]:
        inner = getattr(teacher, "module", teacher)
        with torch.no_grad():
            of_teacher = _ForwardRedirection()(teacher, inner, hidden, inner)
        heads = model.lm_head.weight, inner.lm_head.weight
        return ours.chunked_divergence_loss(hidden(model), of_teacher, *heads, mask, 0.3)

    return _ForwardRedirection()(wrapped, model, loss_of, model)[0]
