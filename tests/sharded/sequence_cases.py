"""Sequences that are cut over ranks, alone and with a vocabulary that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_kernels import (
    Metrics,
    TokenBatch,
    VocabShard,
    context_parallel_rows,
    linear_policy_loss,
    next_token_targets,
)
from grpo_kernels.testing import make_config
from tests.sharded.ranks import Case, expect

LENGTHS = (16, 0, 24, 8)  # multiples of twice the number of ranks that share sequences
D, V = 6, 19
FIRST = 10  # ids of the first of two shards of the vocabulary
LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class Kind:
    """A loss and the batch that it is taken on."""

    loss: str
    settings: dict[str, Any] = field(default_factory=dict)
    layout: str = "head_tail"
    per_token: bool = False  # advantages
    metric_rows: str = "all"


# a mechanism each: means over tokens or sequences, ratios of sequences, an order over all tokens
KINDS = (
    Kind("dapo", {"top_entropy_quantile": 0.5}),
    Kind("grpo", {"beta": 0.1, "entropy_coef": 0.1}, "contiguous", per_token=True),
    Kind("gspo", {"rollout_correction_mode": "sequence_mask", "rollout_correction_max": 1.5}),
    Kind("gmpo", layout="contiguous"),
    Kind("vespo", {"beta": 0.1}, metric_rows="active"),
)


@dataclass(frozen=True)
class Grid:
    """How many ranks share sequences, and the vocabulary."""

    cp: int
    tp: int


def cases() -> dict[str, Case]:
    return dict(_cases())


def _cases() -> Iterator[tuple[str, Case]]:
    grid = Grid(cp=2, tp=dist.get_world_size() // 2)
    for kind in KINDS:
        yield f"{grid}, {kind}", partial(check, kind, grid)
    if grid.tp == 1:
        yield "what is wrong on one rank", check_errors


def check(kind: Kind, grid: Grid) -> None:
    """Assert that the mean of the ranks' results is that of one process."""
    mesh = _mesh(grid)
    place, column = mesh.get_coordinate()
    tokens = make_tokens(kind)
    own = _of_rank(tokens, kind.layout, place, grid.cp)
    found = run(kind, own, mesh["cp"], mesh["tp"] if grid.tp > 1 else None)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found | {"place": own["place"], "column": column})
    whole = run(kind, tokens)
    for shard in range(grid.tp):
        alike = [each for each in everyone if each["column"] == shard]
        dweight = whole["dweight"]
        if grid.tp > 1:
            dweight = dweight.split((FIRST, V - FIRST))[shard]
        _compare(alike, whole | {"dweight": dweight})


def _compare(found: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    exact: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}
    for name in ("loss", "dweight"):
        mean = torch.stack([each[name] for each in found]).mean(0)
        torch.testing.assert_close(mean, whole[name], **exact)
    dhidden = torch.zeros_like(whole["dhidden"])
    for each in found:
        dhidden[each["place"]] += each["dhidden"] / len(found)
    torch.testing.assert_close(dhidden, whole["dhidden"], **exact)
    if dist.get_rank() > 0:  # one rank may read metrics alone
        return
    merged = Metrics.merge(Metrics(each["stats"]) for each in found)
    expected = Metrics(whole["stats"])
    assert set(merged) == set(expected)
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], equal_nan=True, msg=name)


def check_errors() -> None:
    """Read on each of two ranks what is wrong on one of them."""
    group, rank = dist.group.WORLD, dist.get_rank()
    odd = rank == 1
    own = _of_rank(make_tokens(Kind("grpo")), "head_tail", rank, 2)
    target, advantages, cu_seqlens = own["targets"], own["advantages"], own["cu_seqlens"]
    old = {"old_logprobs": own["old_logprobs"]}

    def make(cu_seqlens: Tensor, advantages: Tensor, group: Any, **optional: Any) -> TokenBatch:
        return TokenBatch.from_packed(
            target, advantages, cu_seqlens, sequence_group=group, **optional
        )

    alike = "sequence_group: expected the same {} on all of its ranks, got {}"
    fewer = torch.cat([cu_seqlens[:1], cu_seqlens[2:]]) if odd else cu_seqlens
    few = partial(make, fewer, advantages[: fewer.numel() - 1], group)
    expect(alike.format("number of sequences", "4, 3"), few)
    some = partial(make, cu_seqlens, advantages, group, **(old if odd else {}))
    expect(alike.format("optional arguments", r"\[\], \['old_logprobs'\]"), some)
    nan = "advantages: expected finite values on valid tokens, got NaN or infinity"
    heard = nan if odd else f"sequence_group: rank 1 raised an error: {nan}"
    expect(heard, lambda: make(cu_seqlens, advantages / 0 if odd else advantages, group))
    expect("one-dimensional device mesh, got 'cp'$", partial(make, cu_seqlens, advantages, "cp"))


@cache
def _mesh(grid: Grid) -> DeviceMesh:
    return init_device_mesh("cpu", (grid.cp, grid.tp), mesh_dim_names=("cp", "tp"))


def make_tokens(kind: Kind) -> dict[str, Tensor]:
    """Return packed tokens with all that a loss may read of them."""
    g = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    ids = torch.randint(0, V, (total,), generator=g)
    mask = torch.rand(total, generator=g) > 0.3
    mask[-LENGTHS[-1] - 4 :] = False  # with contiguous rows some rank has none
    logprobs = {name: -2.5 + 0.4 * normal(total) for name in LOGPROBS}
    hidden, advantages = normal(total, D), normal(len(LENGTHS))
    advantages[0] = 0  # whose tokens are skipped
    if kind.per_token:
        of = torch.repeat_interleave(torch.tensor(LENGTHS))
        advantages = advantages[of] + normal(total) * (advantages[of] != 0)
        # of the third sequence one token alone has an advantage
        alone = torch.arange(total) == (mask & (of == 2)).nonzero()[0]
        advantages = torch.where((of == 2) & ~alone, 0, advantages)
    targets = next_token_targets(ids, cu_seqlens, mask)
    return {
        "hidden": hidden, "targets": targets, "advantages": advantages, "cu_seqlens": cu_seqlens,
        "place": torch.arange(total), **logprobs,
    }  # fmt: skip


def _of_rank(tokens: dict[str, Tensor], layout: str, rank: int, size: int) -> dict[str, Tensor]:
    rows, cu_seqlens = context_parallel_rows(
        tokens["cu_seqlens"], rank=rank, size=size, layout=layout
    )
    per_token = tokens["place"].shape
    part = {n: x[rows] for n, x in tokens.items() if x.shape[:1] == per_token}
    return tokens | part | {"cu_seqlens": cu_seqlens}


def run(
    kind: Kind, tokens: dict[str, Tensor], sequence_group: Any = None, vocab_group: Any = None
) -> dict[str, Any]:
    """Return the loss, its gradients and statistics on some tokens."""
    optional: dict[str, Any] = {name: tokens[name] for name in LOGPROBS}
    count = (tokens["targets"] != -100).sum().double()
    if sequence_group is not None:
        dist.all_reduce(count)
        count /= dist.get_world_size()
    optional |= {"num_items_in_batch": 2 * count, "num_tokens_in_micro_batch": count}
    optional["gradient_accumulation_steps"] = 2
    batch = TokenBatch.from_packed(
        tokens["targets"], tokens["advantages"], tokens["cu_seqlens"],
        sequence_group=sequence_group, **optional,
    )  # fmt: skip
    g = torch.Generator().manual_seed(2)
    weight, shard = torch.randn(V, D, generator=g, dtype=torch.float64), None
    if vocab_group is not None:
        weight = weight.split((FIRST, V - FIRST))[vocab_group.get_local_rank()].clone()
        shard = VocabShard.of(vocab_group, weight)
    hidden, weight = tokens["hidden"].detach().requires_grad_(), weight.requires_grad_()
    loss, metrics = linear_policy_loss(
        hidden, weight, batch, make_config(kind.loss, **kind.settings),
        vocab_shard=shard, metric_rows=kind.metric_rows,
    )  # fmt: skip
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    found = {"loss": loss.detach(), "dhidden": dhidden, "dweight": dweight}
    return {**found, "stats": dict(metrics.stats)}
