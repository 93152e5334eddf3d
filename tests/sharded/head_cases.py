"""Wrappings of a model under FSDP2, and what a plain ``full_tensor()`` makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from grpo_kernels import PolicyLossOutput, TokenBatch, VocabShard, linear_policy_loss
from grpo_kernels.testing import make_config
from tests.sharded.ranks import Case, expect
from tests.sharded.training import (
    LENGTH,
    MICRO_BATCHES,
    SEQUENCES,
    WIDTH,
    Tiny,
    Variant,
    adapt,
    checkpoint,
    freeze,
    fused_loss,
    held_loss,
    lazy,
    lazy_loss,
    loss_of,
    micro_batches,
    plain_loss,
    train,
)


def root(model: Tiny) -> None:
    fully_shard(model)


def with_norm(model: Tiny) -> None:
    """Wrap as accelerate does: norm and head in one unit that stays gathered."""
    fully_shard(model.layer)
    fully_shard([model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)


def resharded(model: Tiny) -> None:
    """Free every unit after its forward, the root's too."""
    fully_shard(model.layer)
    fully_shard([model.norm, model.lm_head])
    fully_shard(model, reshard_after_forward=True)


def alone(model: Tiny) -> None:
    fully_shard(model.lm_head)
    fully_shard(model)


WRAPPINGS = {"with norm": with_norm, "resharded": resharded, "alone": alone}


VARIANTS = {
    "FusedHead": Variant(head=fused_loss),
    "a held weight": Variant(head=held_loss),
    "after the model's forward": Variant(head=fused_loss, outside=True),
    "activation checkpointing": Variant(head=fused_loss, prepare=checkpoint),
    "lazy logits": Variant(head=lazy_loss, prepare=lazy, fused=False),
    "frozen": Variant(head=fused_loss, prepare=freeze),
    "LoRA on the head": Variant(head=fused_loss, prepare=adapt, fused=False),
    "LoRA, after the model's forward": Variant(
        head=fused_loss, prepare=adapt, fused=False, outside=True
    ),
}
TIED = Variant(head=fused_loss, tied=True)
Gradients = list[dict[str, Tensor]]  # of every step


def wrapped(wrap: Callable[[Tiny], None]) -> Callable[[Tiny, Variant], Gradients]:
    """Return what trains a model on this rank, wrapped."""

    def trained(model: Tiny, variant: Variant) -> Gradients:
        wrap(model)
        return train(model, variant, [dist.get_rank()])

    return trained


def made(variant: Variant) -> Tiny:
    model = Tiny(variant.tied, variant.fused)
    variant.prepare(model)
    return model


@cache
def of_one_process(variant: Variant) -> Gradients:
    return train(made(variant), variant, list(range(dist.get_world_size())))


def errors(trained: Callable[[Tiny, Variant], Gradients], variant: Variant) -> dict[str, float]:
    """Return the largest relative errors of the head's and the other gradients, of any step.

    Against one process's mean gradient; each has taken the steps before by its own gradients.
    """
    largest = {"head": 0.0, "others": 0.0}
    for mine, right in zip(trained(made(variant), variant), of_one_process(variant), strict=True):
        assert mine.keys() == right.keys()
        for name, value in right.items():
            kind = "head" if name.startswith("lm_head") else "others"
            error = (mine[name] - value).norm() / value.norm()
            largest[kind] = max(largest[kind], float(error))
    return largest


def check(trained: Callable[[Tiny, Variant], Gradients], variant: Variant) -> None:
    for name, error in errors(trained, variant).items():
        assert error < 2e-6, (name, error)


def cases() -> dict[str, Case]:
    return dict(_cases())


def _cases() -> Iterator[tuple[str, Case]]:
    if dist.get_world_size() > 2:  # of two dimensions of a mesh
        yield "HSDP", check_hybrid
        yield "tensor parallel, a held shard", check_tensor_parallel
        return
    for wrapping, wrap in WRAPPINGS.items():
        for name, variant in VARIANTS.items():
            yield f"{name}, {wrapping}", partial(check, wrapped(wrap), variant)
    on_fused = Variant(head=fused_loss, prepare=adapt)
    yield "LoRA on a FusedHead", partial(check, wrapped(alone), on_fused)
    yield "tied, root", partial(check, wrapped(root), TIED)
    yield "plain full_tensor, head alone", check_plain
    yield "mixed precision", check_mixed_precision
    yield "log-probabilities changed in place", check_in_place
    yield "FSDP1, head alone", check_fsdp1
    yield "refused", check_refused


def check_plain() -> None:
    """Keep what the documents say true: a plain full_tensor() loses most of the gradient."""
    assert errors(wrapped(alone), Variant(head=plain_loss))["head"] > 0.5


def check_hybrid() -> None:
    """Gather a weight that is replicated in one dimension of the mesh and cut in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def wrap(model: Tiny) -> None:
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)

    check(wrapped(wrap), VARIANTS["FusedHead"])
    # a held weight's gradient is the mean over both dimensions
    check(wrapped(wrap), VARIANTS["a held weight"])


def check_mixed_precision() -> None:
    """Run in 16 bits, with reductions in fp32: hidden states and the weight agree in dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(model: Tiny) -> None:
        fully_shard(model.lm_head, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    for error in errors(wrapped(wrap), VARIANTS["FusedHead"]).values():
        assert error < 0.05
    model = Tiny()
    wrap(model)
    ids, _ = next(micro_batches(0))
    temperature = torch.full((SEQUENCES, LENGTH - 1), 0.7)  # is not among what is cast

    def logprobs(temperature: Any) -> Tensor:
        out = model(ids, lambda head, x: head(x, ids[:, 1:], temperature=temperature))
        return out.logprobs.detach()

    assert torch.equal(logprobs(temperature), logprobs(0.7))


def check_in_place() -> None:
    """FSDP2's hook is lost with a view that is changed in place."""

    def squared(head: Any, hidden: Tensor, batch: TokenBatch) -> PolicyLossOutput:
        logprobs = head(hidden, batch.target.view(hidden.shape[:-1])).logprobs
        logprobs += 1.0
        return PolicyLossOutput(logprobs.square().mean(), {})

    check(wrapped(alone), Variant(head=squared))


def check_fsdp1() -> None:
    """Compare the parameters after all steps; FSDP1's wrapper is called with a function."""

    def loss(head: Any, hidden: Tensor, batch: TokenBatch) -> PolicyLossOutput:
        config = make_config("dapo")
        return head(hidden, lambda hidden, head: linear_policy_loss(hidden, head, batch, config))

    model = Tiny()
    one, variant = copy.deepcopy(model), Variant(head=loss)
    train(one, variant, list(range(dist.get_world_size())))
    on_cpu = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    model.lm_head = on_cpu(model.lm_head)
    sharded = on_cpu(model)
    optimizer, batches = (
        torch.optim.SGD(sharded.parameters(), lr=0.3),
        micro_batches(dist.get_rank()),
    )
    for number, (ids, batch) in enumerate(batches):
        last = (number + 1) % MICRO_BATCHES == 0
        with nullcontext() if last else sharded.no_sync():
            loss_of(sharded, model, ids, variant, batch).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    hidden = torch.zeros(SEQUENCES, LENGTH - 1, WIDTH)
    config = make_config("dapo")
    expect("FSDP has freed", lambda: model.lm_head.policy_loss(hidden, batch, config))
    with FullyShardedDataParallel.summon_full_params(sharded):
        for own, right in zip(sharded.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(own, right)


def check_tensor_parallel() -> None:
    """Take the loss on a DTensor whose other dimensions of the mesh are data-parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, config = Tiny(), make_config("dapo")
    weight = distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(1), Shard(0)])
    weight.requires_grad_()
    shard = VocabShard.of(mesh["tp"], weight)
    dp = dist.get_rank() // 2
    whole_weight = model.lm_head.weight.detach().clone().requires_grad_()
    exact = torch.zeros_like(whole_weight)
    for rank in range(2):
        ids, batch = next(micro_batches(rank))
        hidden = model.embed(ids).detach()[:, :-1].requires_grad_()
        loss = linear_policy_loss(hidden, whole_weight, batch, config).loss
        dhidden, dweight = torch.autograd.grad(loss, (hidden, whole_weight))
        exact += dweight / 2
        if rank == dp:
            right = loss.detach(), dhidden
    ids, batch = next(micro_batches(dp))
    hidden = model.embed(ids).detach()[:, :-1].requires_grad_()
    loss = linear_policy_loss(hidden, weight, batch, config, vocab_shard=shard).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), right[0])
    torch.testing.assert_close(hidden.grad, right[1])
    torch.testing.assert_close(weight.grad.full_tensor(), exact)


def check_refused() -> None:
    model = Tiny()
    ids, batch = next(micro_batches(0))
    config = make_config("dapo")
    hidden = model.embed(ids)[:, :-1].detach()
    empty = torch.zeros(0)
    expect("if ZeRO-3 or FSDP", lambda: linear_policy_loss(hidden, empty, batch, config))
    flat = model.lm_head.weight.detach().flatten()
    expect("if ZeRO-3 or FSDP", lambda: linear_policy_loss(hidden, flat, batch, config))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(hidden, mesh, [Shard(0)])
    weight = model.lm_head.weight
    expect("hidden: .*DTensor", lambda: linear_policy_loss(rows, weight, batch, config))
