"""Ranks that share a vocabulary; generated cases on two simulated ones are in tests/net."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import (
    Bounded,
    VocabShard,
    available_backends,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.linear_logprobs import OUTPUTS
from grpo_kernels.testing import (
    assert_all_as_exact_as,
    make_config,
    make_problem,
    run,
)
from tests.sharded.ranks import Case, expect

VOCAB = 53
FLOOR = 2e-6


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {
        "batch_invariant": check_batch_invariant,
        "loss": check_loss,
        "loss compiled": check_compiled,
        "sparse": check_sparse,
        "padded vocabulary, main_grad": check_padded,
        "an infinite bias": check_infinite_bias,
        "refused": check_refused,
    }
    if "triton" in available_backends():  # interpreted, without a tile
        found["loss triton"] = partial(check_loss, backend="triton", activation_bytes=0)
    return found


def bounds(size: int) -> list[int]:
    """Return where the ranks' ids begin and end: shares of different sizes."""
    return [round(VOCAB * (rank / size) ** 1.2) for rank in range(size)] + [VOCAB]


def own_part(x: Tensor) -> Tensor:
    ends = bounds(dist.get_world_size())
    rank = dist.get_rank()
    return x.detach()[ends[rank] : ends[rank + 1]].clone().requires_grad_(x.requires_grad)


def gathered(part: Tensor) -> Tensor:
    """Return the rows of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach())
    return torch.cat(parts)


def check_batch_invariant() -> None:
    """Compare a row's bits alone and among others, and with gradients and without."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    weight = own_part(problem.weight)
    shard = VocabShard.of(dist.group.WORLD, weight)
    options = dict(vocab_shard=shard, batch_invariant=True, outputs=("logprobs", "entropy"))
    hidden, target = problem.hidden.flatten(0, 1), problem.target.flatten()
    every = linear_logprobs(hidden, weight, target, **options)
    for rows in (slice(0, 1), slice(5, 12)):
        alone = linear_logprobs(hidden[rows].detach(), weight.detach(), target[rows], **options)
        assert torch.equal(alone.logprobs, every.logprobs[rows])
        assert torch.equal(alone.entropy, every.entropy[rows])


def loss_run(**options: Any) -> dict[str, Tensor]:
    """Return what the ranks find together."""
    mine = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    mine = replace(mine, weight=own_part(mine.weight), bias=own_part(mine.bias))
    shard = VocabShard.of(dist.group.WORLD, mine.weight)
    found = run(mine, make_config("dapo", beta=0.05), vocab_shard=shard, **options)
    return found | {name: gathered(found[name]) for name in ("dweight", "dbias")}


def check_loss(**options: Any) -> None:
    whole, config = make_problem(vocab_size=VOCAB), make_config("dapo", beta=0.05)
    exact, eager = (
        run(x, config, backend="reference") for x in (whole, whole.to("cpu", torch.float32))
    )
    for schedule in ("one_pass", "two_pass"):
        found = loss_run(schedule=schedule, **options)
        assert_all_as_exact_as(found, eager, exact, FLOOR, FLOOR)


def check_sparse() -> None:
    """Compare with exact gradients: of sampled rows, and of such as no rank has the slots for."""
    whole, config = make_problem(vocab_size=VOCAB), make_config("dapo", beta=0.05)
    exact = run(whole, config, backend="reference")
    for slots, schedule, head in itertools.product(
        (VOCAB, 2), ("one_pass", "two_pass"), (True, False)
    ):
        backward = Bounded(tolerance=2e-2, slots=slots, exact_weight=head)
        found = loss_run(schedule=schedule, backward=backward)
        alike: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(alike, found["dhidden"])
        assert all(torch.equal(other, alike[0]) for other in alike)
        torch.testing.assert_close(found["loss"].double(), exact["loss"], rtol=1e-5, atol=1e-6)
        for name in ("dhidden", "dweight", "dbias"):
            error = (found[name].double() - exact[name]).norm() / exact[name].norm()
            sampled = slots == VOCAB and not (head and name != "dhidden")
            assert error < (4e-2 if sampled else 1e-5), (name, slots, schedule, head, error)


def check_compiled() -> None:
    compiled = torch.compile(linear_policy_loss, backend="eager", fullgraph=True)
    found, plain = loss_run(function=compiled), loss_run()
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


def check_padded() -> None:
    """Give the last rank rows behind the vocabulary: no probability, no gradient."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    config = make_config("dapo")
    size = dist.get_world_size()
    rows = -(-VOCAB // size) + 1
    padded = torch.full((rows * size, 16), 3.0)
    padded[:VOCAB] = problem.weight.detach()
    own = padded.split(rows)[dist.get_rank()].clone().requires_grad_()
    shard = VocabShard.of(dist.group.WORLD, own, vocab_size=VOCAB)
    problem = replace(problem, bias=None)
    leaves = dict(hidden=problem.hidden, weight=problem.weight)
    exact = run(problem, config, leaves=leaves, backend="reference")
    mine, leaves = replace(problem, weight=own), leaves | {"weight": own}
    found = run(mine, config, leaves=leaves, vocab_shard=shard)
    for schedule in ("one_pass", "two_pass"):
        buffer = torch.zeros_like(own)  # of all rows, as Megatron's
        run(mine, config, leaves=leaves, vocab_shard=shard, schedule=schedule, main_grad=buffer)
        torch.testing.assert_close(buffer, found["dweight"])
    torch.testing.assert_close(found["loss"], exact["loss"])
    torch.testing.assert_close(found["dhidden"], exact["dhidden"])
    dweight = gathered(found["dweight"])
    torch.testing.assert_close(dweight[:VOCAB], exact["dweight"])
    assert not dweight[VOCAB:].any()


def check_infinite_bias() -> None:
    """Give ids no probability, on one rank all of them, and one row no softmax."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    bias = problem.bias.detach().clone()
    bias[: bounds(dist.get_world_size())[1]] = -torch.inf
    hidden = problem.hidden.detach().clone()
    hidden[0, 0] = torch.nan
    outputs = tuple(name for name in OUTPUTS if name != "masked_logprobs")
    options: dict[str, Any] = {"outputs": outputs, "top_k": 20}  # more than a rank has
    exact = linear_logprobs(
        hidden, problem.weight.detach(), problem.target, bias=bias, backend="reference", **options
    )
    weight = own_part(problem.weight.detach())
    shard = VocabShard.of(dist.group.WORLD, weight)
    found = linear_logprobs(
        hidden, weight, problem.target, bias=own_part(bias), vocab_shard=shard, **options
    )
    for name, value in found._asdict().items():
        if value is not None:
            torch.testing.assert_close(value, getattr(exact, name), equal_nan=True, msg=name)


def _call(**changes: Any) -> None:
    """Call with what this rank has, changed."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    weight = own_part(problem.weight)
    shard = VocabShard.of(dist.group.WORLD, weight)
    arguments = dict(hidden=problem.hidden, weight=weight, target=problem.target) | changes
    linear_logprobs(**arguments, vocab_shard=shard)


def check_refused() -> None:
    """Read on each rank what is wrong on all, or on one of them."""
    for message, call in [*_wrong_everywhere(), *_not_alike(), *_wrong_on_one_rank()]:
        expect(message, call)
    other = dist.new_group([1])
    if dist.get_rank() == 0:
        expect(
            "group: .* a group without this rank", lambda: VocabShard.of(other, torch.zeros(4, 3))
        )


Refusal = tuple[str, Callable[[], object]]


def _wrong_everywhere() -> Iterator[Refusal]:
    yield "weight: expected .* rows", lambda: _call(weight=torch.zeros(3, 16))
    yield "backend: expected one with vocab_shard", lambda: _call(backend="reference")
    yield "expected a process group", lambda: VocabShard.of("tp", torch.zeros(4, 3))
    few = partial(VocabShard.of, dist.group.WORLD, torch.zeros(4, 3), 4)
    yield "vocab_size: expected at most .* with ids on every rank", few


def _not_alike() -> Iterator[Refusal]:
    """Return what differs between rank 0, or rank 1, and the others."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    rows, odd = (3, 0) if dist.get_rank() == 0 else (4, int(dist.get_rank() == 1))
    few = dict(hidden=problem.hidden[:rows], target=problem.target[:rows])
    yield r"agree on the number of rows, got \[21, 28", lambda: _call(**few)
    shifted = (problem.target + odd).clamp(max=VOCAB - 1)
    yield "agree on targets", lambda: _call(target=shifted)
    yield "agree on the arguments", lambda: _call(temperature=1 - 0.5 * odd)
    of = partial(VocabShard.of, dist.group.WORLD)
    yield "agree on D of weight", lambda: of(torch.zeros(4, rows))
    yield "agree on vocab_size", lambda: of(torch.zeros(4, 3), 5 + odd)


def _wrong_on_one_rank() -> Iterator[Refusal]:
    """Return what is wrong on rank 1 alone, of which the others hear."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    odd = dist.get_rank() == 1
    message = "weight: expected dtype" if odd else r"ranks \[1\] rejected this call"
    yield message, partial(_call, **({"hidden": problem.hidden.double()} if odd else {}))
