"""Ranks that share a vocabulary; generated cases on two simulated ones are in tests/net."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import (
    Bounded,
    HeadLoRA,
    LossConfig,
    SamplingMask,
    VocabShard,
    available_backends,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.linear_logprobs import OUTPUTS
from grpo_kernels.testing import (
    Problem,
    assert_all_as_exact_as,
    make_config,
    make_problem,
    poisoned_allocations,
    run,
)
from tests.sharded.ranks import Case, expect

VOCAB, TOP_K = 53, 20  # more than a rank of four has
FLOOR = 2e-6


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {
        "outputs": check_outputs,
        "batch_invariant": check_batch_invariant,
        "loss": check_loss,
        "loss compiled": check_compiled,
        "padded vocabulary, main_grad": check_padded,
        "an infinite bias": check_infinite_bias,
        "refused": check_refused,
    }
    if "triton" in available_backends():  # interpreted, without a tile
        triton = {"backend": "triton", "activation_bytes": 0}
        found["outputs triton"] = partial(check_outputs, **triton)
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


def logprobs_run(
    problem: Problem, weight: Tensor, bias: Tensor, lora: HeadLoRA, **kwargs: Any
) -> dict[str, Tensor]:
    """Return all outputs, and the gradients of a random combination of the differentiable ones."""
    target = torch.where(problem.mask, problem.target, -100)
    generator = torch.Generator().manual_seed(5)
    left = torch.rand(target.numel(), VOCAB, generator=generator) < 0.3
    mask = SamplingMask.from_lists([row.nonzero()[:, 0].tolist() for row in left])
    out = linear_logprobs(
        problem.hidden, weight, target, bias=bias, lora=lora, outputs=OUTPUTS, top_k=TOP_K,
        sampling_mask=mask, softcap=3.0, temperature=1.7, logit_scale=0.5, **kwargs,
    )  # fmt: skip
    loss = torch.zeros((), dtype=torch.float64)
    for name in ("logprobs", "entropy", "masked_logprobs"):
        outer = torch.randn(target.shape, generator=generator, dtype=torch.float64)
        loss = loss + (getattr(out, name).double() * outer).sum()
    inputs = {"hidden": problem.hidden, "weight": weight, "bias": bias, "a": lora.a, "b": lora.b}
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    found = {f"d{name}": value for name, value in zip(inputs, gradients, strict=True)}
    return {name: getattr(out, name) for name in OUTPUTS} | found


def check_outputs(**kwargs: Any) -> None:
    whole = make_problem(vocab_size=VOCAB)
    factors = torch.randn(3, 16) * 0.3, torch.randn(VOCAB, 3) * 0.3

    def lora(part: Callable[[Tensor], Tensor]) -> HeadLoRA:
        a, b = (x.clone().requires_grad_() for x in factors)
        return HeadLoRA(a=a, b=part(b), scaling=0.5)

    def reference(one: Problem) -> dict[str, Tensor]:
        return logprobs_run(one, one.weight, one.bias, lora(lambda x: x), backend="reference")

    mine = whole.to("cpu", torch.float32)
    exact, eager = reference(whole), reference(mine)
    weight, bias, own_lora = own_part(mine.weight), own_part(mine.bias), lora(own_part)
    shard = VocabShard.of(dist.group.WORLD, weight)
    with poisoned_allocations():
        found = logprobs_run(mine, weight, bias, own_lora, vocab_shard=shard, **kwargs)
    for name in ("dweight", "dbias", "db"):
        found[name] = gathered(found[name])
    for name in ("is_top1", "rank", "topk_indices"):
        assert torch.equal(found.pop(name), exact[name]), name
    rest = {name: exact[name] for name in found}
    assert_all_as_exact_as(found, eager, rest, FLOOR, FLOOR)


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
    found = dict(run(mine, make_config("dapo", beta=0.05), vocab_shard=shard, **options))
    return found | {name: gathered(found[name]) for name in ("dweight", "dbias")}


def check_loss() -> None:
    whole, config = make_problem(vocab_size=VOCAB), make_config("dapo", beta=0.05)
    exact, eager = (
        dict(run(x, config, backend="reference")) for x in (whole, whole.to("cpu", torch.float32))
    )
    for schedule in ("one_pass", "two_pass"):
        found = loss_run(schedule=schedule, max_workspace_bytes=16 * VOCAB * 8)
        assert_all_as_exact_as(found, eager, exact, FLOOR, FLOOR)


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
    options: dict[str, Any] = {"outputs": outputs, "top_k": TOP_K}
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
            right = getattr(exact, name)
            torch.testing.assert_close(value, right, equal_nan=True, msg=f"{name}: {value} {right}")


def _call(**changes: Any) -> None:
    """Call with what this rank has, changed."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    weight = own_part(problem.weight)
    shard = VocabShard.of(dist.group.WORLD, weight)
    arguments = dict(hidden=problem.hidden, weight=weight, target=problem.target) | changes
    linear_logprobs(**arguments, vocab_shard=shard)


def _loss(config: LossConfig, **options: Any) -> None:
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    mine = replace(problem, weight=own_part(problem.weight), bias=None)
    run(mine, config, vocab_shard=VocabShard.of(dist.group.WORLD, mine.weight), **options)


def check_refused() -> None:
    """Read on each rank what is wrong on all, or on one of them."""
    for message, call in [*_wrong_everywhere(), *_not_alike(), *_wrong_on_one_rank()]:
        expect(message, call)
    other = dist.new_group([1])
    if dist.get_rank() == 0:
        expect("group: .* that it is not in", lambda: VocabShard.of(other, torch.zeros(4, 3)))


Refusal = tuple[str, Callable[[], object]]


def _wrong_everywhere() -> Iterator[Refusal]:
    yield "weight: expected .* rows", lambda: _call(weight=torch.zeros(3, 16))
    yield "backend: expected another", lambda: _call(backend="reference")
    yield "backward: expected 'exact'", lambda: _call(backward=Bounded())
    yield "expected a process group", lambda: VocabShard.of("tp", torch.zeros(4, 3))
    for size in (4, 400):
        few = partial(VocabShard.of, dist.group.WORLD, torch.zeros(4, 3), size)
        yield "vocab_size: expected ids on every rank", few


def _not_alike() -> Iterator[Refusal]:
    """Return what differs between rank 0, or rank 1, and the others."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    rows, odd = (3, 0) if dist.get_rank() == 0 else (4, int(dist.get_rank() == 1))
    few = dict(hidden=problem.hidden[:rows], target=problem.target[:rows])
    yield r"agree on the number of rows, got \[21, 28", lambda: _call(**few)
    shifted = (problem.target + odd).clamp(max=VOCAB - 1)
    yield "agree on targets", lambda: _call(target=shifted)
    yield "agree on the arguments", lambda: _call(temperature=1 - 0.5 * odd)
    config = make_config("cispo" if odd else "dapo")
    yield "agree on the arguments", lambda: _loss(config)
    of = partial(VocabShard.of, dist.group.WORLD)
    yield "agree on D of weight", lambda: of(torch.zeros(4, rows))
    yield "agree on vocab_size", lambda: of(torch.zeros(4, 3), 5 + odd)


def _wrong_on_one_rank() -> Iterator[Refusal]:
    """Return what is wrong on rank 1 alone, of which the others hear."""
    problem = make_problem(dtype=torch.float32, vocab_size=VOCAB)
    outside = problem.target.clone()
    outside[0, 0] = VOCAB
    wrong = {
        r"target: expected ids in \[0, 53\)": {"target": outside},
        "weight: expected dtype": {"hidden": problem.hidden.double()},
    }
    odd, heard = dist.get_rank() == 1, r"ranks \[1\] have refused"
    for message, changes in wrong.items():
        yield message if odd else heard, partial(_call, **(changes if odd else {}))
    options = {"main_grad": torch.zeros(1, 16)} if odd else {}
    message = "main_grad: expected a contiguous" if odd else heard
    yield message, partial(_loss, make_config("dapo"), **options)
