"""Merges the statistics of rows over the ranks that share the vocabulary.

With ``w_r = exp(lse_r - lse)``, the mass of rank r's ids, ``H = sum_r w_r (H_r + lse - lse_r)``.
All terms have the same sign, so nothing cancels. It needs one gather of a few numbers per row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats
from grpo_kernels.batch import host
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.head import Head, VocabShard

_FACTS = ("the number of rows", "D", "rows of a tile", "the arguments", "targets")
_FAILED = -1  # sent by a rank that raised an error


def merge_vocab_shards(stats: RowStats, rows: Rows) -> RowStats:
    """Return the statistics over all columns of local rows, given those over this rank's columns.

    Log-probabilities of targets on other ranks are ignored.
    """
    shard = rows.head.shard
    assert shard is not None
    own = shard.owns(rows.target)
    score = stats.logprobs.double() + stats.lse
    # if all scores are -inf there is no softmax, and no log-probability
    score = torch.where(own & (stats.lse != -torch.inf), score, -torch.inf)
    parts = {"lse": stats.lse, "entropy": stats.entropy, "score": score, "own": own}
    names = ("is_top1", "sum_sq_probs", "max_logit", "min_logit")
    parts |= {n: value for n in names if (value := getattr(stats, n)) is not None}
    gathered = shard.gather(torch.stack([part.double() for part in parts.values()]))  # (n, k, C)
    of = dict(zip(parts, gathered.unbind(1), strict=True))
    lse = of["lse"].logsumexp(0)
    mass = (of["lse"] - lse).exp()
    none = mass == 0  # 0 times infinity would be NaN
    entropy = (mass * (of["entropy"] + (lse - of["lse"]))).masked_fill(none, 0).sum(0)
    merged = {"logprobs": of["score"].amax(0) - lse, "entropy": entropy.clamp(min=0)}
    is_top1 = None
    if stats.is_top1 is not None:
        square = (mass * mass * of["sum_sq_probs"]).masked_fill(none, 0).sum(0)
        extremes = {"max_logit": of["max_logit"].amax(0), "min_logit": of["min_logit"].amin(0)}
        merged |= {"sum_sq_probs": square, **extremes}
        is_top1 = _is_first(of["own"], of["is_top1"], of["max_logit"])
    wide = stats.logprobs.dtype
    rounded = {name: value.to(wide) for name, value in merged.items()}
    return RowStats(**rounded, lse=lse, is_top1=is_top1)


def _is_first(own: Tensor, is_top1: Tensor, largest: Tensor) -> Tensor:
    """Return where the target is the first argmax on its own rank, and over all ranks.

    All arguments are (n, C). Such a target has its rank's largest score. Ranks are in the order of
    ids, so on ties the earlier rank comes first.
    """
    own, ranks = own.bool(), torch.arange(own.shape[0], device=own.device)[:, None]
    owner = (own * ranks).sum(0)
    best = largest.gather(0, owner[None])
    beaten = torch.where(ranks < owner, largest >= best, largest > best) & ~own
    return is_top1.bool().gather(0, owner[None]).squeeze(0) & ~beaten.any(0)


def check_ranks_agree(target: Tensor, head: Head, route: Route, facts: tuple[object, ...]) -> None:
    """Raise on every rank unless all make the same call; on a GPU, by an asynchronous assertion.

    Costs one small gather. Without it, a rank with other targets would deadlock in a later
    collective. The ``repr`` of ``facts`` must be the same on all ranks.
    """
    shard = head.shard
    transform = head.transform
    if shard is None:
        return
    tokens = target.numel()
    depth = head.weight.shape[1]
    if isinstance(transform.temperature, Tensor):
        transform = replace(transform, temperature=1.0)
    scaling = None if head.lora is None else head.lora.scaling
    said = repr((route.options, route.dtype, transform, scaling, *facts))
    mine = target.new_tensor([tokens, depth, route.tile_rows, zlib.crc32(said.encode())])
    mine = torch.cat([mine, target.sum()[None]])
    everyone = shard.gather(mine)
    if not host.reading_is_free(mine):
        same = (everyone == everyone[:1]).all()
        host.assert_async(same, f"vocab_shard: expected ranks that agree on {', '.join(_FACTS)}")
        return
    table = host.values(everyone)
    failed = [rank for rank, facts in enumerate(table) if facts[0] == _FAILED]
    if failed:
        raise ValueError(f"vocab_shard: ranks {failed} rejected this call (see their errors)")
    for name, values in zip(_FACTS, zip(*table, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"vocab_shard: expected ranks that agree on {name}, got {list(values)}"
            )


def raise_on_all_ranks(
    shard: VocabShard | None, device: torch.device
) -> AbstractContextManager[object]:  # a decorated generator is not for torch.compile
    """Tell the other ranks, which wait in :func:`check_ranks_agree`, if this one rejects a call."""
    return nullcontext() if shard is None else _tells_others(shard, device)


@contextmanager
def _tells_others(shard: VocabShard, device: torch.device) -> Iterator[None]:
    try:
        yield
    except ValueError:
        shard.gather(torch.full((len(_FACTS),), _FAILED, device=device))
        raise
