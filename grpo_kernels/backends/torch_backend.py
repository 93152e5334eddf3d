"""The base class of backends, in plain torch: any device, any floating-point dtype, also fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.backends.base import (
    ANY_ERROR,
    BLOCK_ELEMENTS,
    LEAST_LOGP,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
    concatenate,
    row_blocks,
    slope,
    transformed,
)
from grpo_kernels.backends.divergence import Divergence, Pair
from grpo_kernels.backends.entries import (
    TINY,
    best_cut,
    block_entries,
    block_tail_sums,
    grouped_sums,
    ladder,
    listed,
    row_keys,
    row_weights,
    sampled_blocks,
    sizes_at_target,
)
from grpo_kernels.head import Head

_ENTRIES_BLOCK = 1 << 20  # elements of a block: some twenty fp64 temporaries


class Backend:
    """The passes in plain torch, block by block; subclasses replace the ones they have kernels for.

    A row kernel turns a tile of raw logits (C rows, V columns) into per-row statistics, and, given
    the gradients of those, into the gradient of the tile, in place.
    """

    name = "chunked"
    has_tiles = True  # False: the eager reference, which computes all logits at once
    generates = False  # whether the loss can run in kernels that are generated from it
    compiles = False  # whether kernels are compiled on their first launch
    for_gpus = False  # whether "auto" skips it for tensors on a CPU
    logp_gradients: tuple[torch.dtype, ...] = ()  # dtypes that :meth:`logp_gradient_` supports
    absence = ""  # warning if it is missing; {} is the reason

    def unavailable(self) -> str | None:
        """Say why this machine cannot run it; None if it can."""
        return None

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Say why such tensors cannot use it; None if they can."""
        return None

    def numerics(
        self,
        dtype: torch.dtype,
        head: Head,
        precision: str,
        tiled: bool,
    ) -> list[str]:
        """Return the configuration of its kernels, for the fingerprint."""
        return []

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        """Compute the statistics of a tile, without changing it.

        If all logits of a row are -inf, so is its ``lse``; its other statistics are undefined.
        """
        blocks = row_blocks(tile.logits, BLOCK_ELEMENTS)
        return concatenate([_block_stats(tile.rows(block), extras) for block in blocks])

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        grad_stats: StatsGrad,
        out: Tensor,
    ) -> Tensor:
        """Write the gradient of the raw logits to ``out`` (C, V), possibly over them; return it.

        With ``p = exp(z - lse)`` and ``H`` the entropy,
        ``dz_j = dlogp (1[j = y] - p_j) - dentropy p_j (log p_j + H)``. ``out`` has the dtype of the
        logits or 16 bits, in separate storage or as an :func:`output_view` of the logits.
        """
        for block in row_blocks(tile.logits, BLOCK_ELEMENTS):
            out[block] = _block_dlogits(tile.rows(block), stats.rows(block), grad_stats.rows(block))
        return out

    def logp_gradient_(self, tile: Tile) -> tuple[RowStats, TileGradient]:
        """Compute statistics, and overwrite each row's logits by the gradient of its ``logp``.

        So logits are read once, and the loss can follow later: see :meth:`weighted_gradient`.
        """
        raise NotImplementedError(self.name)

    def weighted_gradient(self, gradient: TileGradient, dlogp: Tensor) -> TileGradient:
        """Return the gradient of ``dlogp * logp`` (C,), given the ``gradient`` of ``logp``.

        A row with weight 0 gets the factor 0, even if its own factor is NaN.
        """
        raise NotImplementedError(self.name)

    def has_linear_gradient(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        """Return whether :meth:`linear_logp_gradient` supports these arguments and is faster."""
        return False

    def linear_logp_gradient(
        self,
        hidden: Tensor,  # (T, D)
        head: Head,
        target: Tensor,  # (T,)
        out: Tensor,  # (T, V) of the dtype of ``hidden``
    ) -> tuple[RowStats, TileGradient]:
        """Compute :meth:`logp_gradient_` from hidden states, without logits in memory."""
        raise NotImplementedError(self.name)

    def scaled(self, gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``gradient * scale``, rounded once to ``dtype``; may overwrite ``gradient``.

        ``scale`` is () and on the same device. On a CPU the gradient keeps its dtype.
        """
        if gradient.dtype == dtype or gradient.device.type == "cpu":  # in place, without a copy
            return gradient.mul_(scale)
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))

    def has_linear_stats(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        """Return whether :meth:`linear_stats` supports these arguments and is faster."""
        return False

    def forms_logits(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        """Return whether :meth:`linear_stats` can write logits for hidden states in ``dtype``."""
        return False

    def linear_stats(
        self,
        hidden: Tensor,  # (T, D)
        head: Head,
        target: Tensor,  # (T,)
        precision: str,
        extras: bool,
        logits: Tensor | None = None,  # (T, V)
    ) -> RowStats:
        """Compute statistics of hidden states without a tile of logits.

        If :meth:`forms_logits`, write the raw logits to ``logits``: a row's bits depend only on
        that row, and the statistics of a target outside the columns are undefined.
        """
        raise NotImplementedError(self.name)

    def divergence_sums(self, pair: Pair, divergence: Divergence) -> Tensor:
        """Return (2, C) fp64 sums of the divergence and of ``logp_grad`` over these columns."""
        blocks = row_blocks(pair.student.logits, BLOCK_ELEMENTS)
        return torch.cat([_block_divergence(pair.rows(block), divergence) for block in blocks], 1)

    def divergence_gradient_(
        self,
        pair: Pair,
        divergence: Divergence,
        logp_grad_sum: Tensor,
        coefficient: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the gradient of ``coefficient * divergence`` (C,) to ``out``; return it.

        ``logp_grad_sum`` (C,) fp64 is over whole rows, ``out`` as for :meth:`dlogits_`. A row with
        coefficient 0 has gradient 0, even if its logits are NaN.
        """
        for block in row_blocks(pair.student.logits, BLOCK_ELEMENTS):
            out[block] = _block_divergence_gradient(
                pair.rows(block), divergence, logp_grad_sum[block], coefficient[block]
            )
        return out

    def chosen_cuts(
        self,
        tile: Tile,
        stats: RowStats,
        grad_stats: StatsGrad | None,
        share: float,
        gradient: TileGradient | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the rows' cuts (C,) with an expected error of all entries of at most ``share``.

        The error is relative, in the Frobenius norm. A row without a gradient has the cut
        ``ANY_ERROR``. ``grad_stats`` (None: 1 for all ``dlogp``) weights rows; with ``dentropy`` it
        defines the gradient. ``gradient`` is as for :meth:`tail_sums`. ``total`` sums over the
        ranks of a split vocabulary; None: it is not split.
        """
        total = total or (lambda x: x)
        of_loss = None if grad_stats is None or grad_stats.dentropy is None else grad_stats
        norm = total(sizes_at_target(tile, stats, of_loss, gradient))
        weight = torch.ones_like(norm) if grad_stats is None else row_weights(grad_stats)
        # relative to the root mean square, to keep the squares of sizes in the range of fp32
        weight = weight / (weight * norm).square().mean().sqrt().clamp(min=TINY)
        rows, columns = tile.logits.shape
        allowed = share**2 * rows
        cuts = ladder(allowed / (weight * norm).sum().clamp(min=TINY))
        dtype = stats.logprobs.dtype
        sums = self.tail_sums(
            tile=tile,
            stats=stats,
            weight=weight.to(dtype),
            cuts=cuts.to(dtype),
            gradient=gradient,
            grad_stats=of_loss,
        )
        blocks, sampled = sampled_blocks(rows, columns)
        cut = best_cut(total(sums.sum(0, dtype=torch.float64) * (blocks / sampled)), cuts, allowed)
        return torch.where(weight > 0, cut / weight.clamp(min=TINY), ANY_ERROR).to(dtype)

    def tail_sums(
        self,
        tile: Tile,
        stats: RowStats,
        weight: Tensor,
        cuts: Tensor,
        gradient: TileGradient | None = None,
        grad_stats: StatsGrad | None = None,
    ) -> Tensor:
        """Return (C, 2, K): sums of the sizes up to each cut, and of their squares, over a sample
        of a row's entries.

        Sizes are the row's ``weight`` (C,) times the gradient of the raw logits, except at the
        target. ``cuts`` (K,) ascend. The gradient is that of ``logp``; if the logits have been
        overwritten, pass the result of :meth:`logp_gradient_` or :meth:`linear_logp_gradient` as
        ``gradient``. With ``grad_stats`` it is the gradient of :meth:`dlogits_`, from ``dlogp`` and
        ``dentropy``. A target outside the tile is on another rank.
        """
        assert gradient is None, "no logits"
        sampled = sampled_blocks(*tile.logits.shape)
        parts = [
            block_tail_sums(
                tile=tile.rows(block),
                stats=stats.rows(block),
                weight=weight[block],
                cuts=cuts,
                grad_stats=None if grad_stats is None else grad_stats.rows(block),
                first=block.start,
                sampled=sampled,
            )
            for block in row_blocks(tile.logits, _ENTRIES_BLOCK)
        ]
        return torch.cat(parts)

    def extract_entries(
        self,
        tile: Tile,
        stats: RowStats,
        seed: int,
        first: int,
        cuts: Tensor,
        slots: int,
        gradient: TileGradient | None = None,
        grad_stats: StatsGrad | None = None,
    ) -> Entries:
        """Choose at most ``slots`` entries per row of a tile, without changing it.

        The sample depends on ``seed`` and on each row's number, counted from ``first``. Entries
        larger than the row's cut (C,) are kept, the others sampled; a row with the cut
        ``ANY_ERROR`` has none. A row is whole if its ``lse`` is not finite or if it is expected to
        need more entries. ``gradient`` and ``grad_stats`` are as for :meth:`tail_sums`.
        """
        assert gradient is None, "no logits"
        keys = row_keys(seed, stats.lse, first)
        parts = [
            block_entries(
                tile=tile.rows(block),
                stats=stats.rows(block),
                keys=keys[block],
                cuts=cuts[block],
                slots=slots,
                grad_stats=None if grad_stats is None else grad_stats.rows(block),
            )
            for block in row_blocks(tile.logits, _ENTRIES_BLOCK)
        ]
        return concatenate(parts)

    def entries_matmul(
        self,
        entries: Entries,
        factor: Tensor,
        matrix: Tensor,
        out: Tensor,
    ) -> None:
        """Set ``out[t] = factor[t] sum_k values[t, k] matrix[ids[t, k]]``, except for whole rows.

        ``factor`` is (C,), ``matrix`` (V, N), ``out`` (C, N) in the matrix's dtype or fp32; sums
        are in fp32 or better. Whole rows are not changed.
        """
        rows, ids, values = listed(entries, factor)
        used, ids = ids.unique(return_inverse=True)
        product = grouped_sums(
            groups=rows, count=len(factor), places=ids, values=values, matrix=matrix[used]
        )
        kept = entries.used >= 0
        out[kept] = product[kept].to(out.dtype)

    def entries_transposed_matmul(
        self,
        entries: Entries,
        factor: Tensor,
        rows: Tensor,
        out: Tensor,
        add: bool,
        count: int,
    ) -> None:
        """Set ``out[v]`` to, or ``add`` to it, the sum of ``factor[t] values[t, k] rows[t]`` over
        all t and k with ``ids[t, k] = v``; there are ``count`` with a nonzero factor.

        ``rows`` is (C, N), ``out`` (V, N) in its dtype or fp32. Sums are in fp32 or better, in the
        order of the rows, and rounded once. Whole rows add nothing.
        """
        places, ids, values = listed(entries, factor)
        order = ids.argsort(stable=True)
        used, ids = ids[order].unique_consecutive(return_inverse=True)
        product = grouped_sums(
            groups=ids, count=len(used), places=places[order], values=values[order], matrix=rows
        )
        if not add:
            out.zero_()
        out[used] = (out[used] + product).to(out.dtype)


def _block_stats(tile: Tile, extras: bool) -> RowStats:
    """Compute the statistics of some rows at once."""
    logits, target, transform = tile
    scores, _ = transformed(logits, transform)  # (C, V)
    lowest = scores.amin(-1) if extras else None
    # align all rows equally: a GPU's reductions group terms by alignment
    scores = torch.nn.functional.pad(scores, (0, -scores.shape[1] % 32), value=float("-inf"))
    top, first = scores.max(-1, keepdim=True)
    is_top1 = first.squeeze(-1) == target if extras else None
    shifted = scores.sub_(top.masked_fill(top == float("-inf"), 0.0))
    shifted_target = shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exponentials = shifted.exp()
    # slightly more than 1 for a nearly certain row: fp32 has no digits for the excess
    total = exponentials.sum(-1, dtype=torch.float64)
    log_total = total.log()
    sum_sq = (exponentials * exponentials).sum(-1) / total**2 if extras else None
    # a logit of -inf has probability 0 and adds nothing: 0 * -inf would be NaN
    weighted = exponentials.mul_(shifted.clamp_(min=LEAST_LOGP))
    entropy = (log_total - weighted.sum(-1) / total).clamp(min=0)
    wide = scores.dtype
    return RowStats(
        logprobs=(shifted_target - log_total).to(wide),
        entropy=entropy.to(wide),
        lse=top.squeeze(-1).double() + log_total,
        is_top1=is_top1,
        sum_sq_probs=sum_sq.to(wide) if sum_sq is not None else None,
        max_logit=top.squeeze(-1) if extras else None,
        min_logit=lowest,
    )


def _block_dlogits(tile: Tile, stats: RowStats, grad_stats: StatsGrad) -> Tensor:
    """Return the gradient of some rows' raw logits."""
    logits, target, transform = tile
    scores, tanh = transformed(logits, transform)
    logp = _relative_to_(scores, stats.lse)
    inside = (target >= 0) & (target < logits.shape[-1])  # otherwise in another slice
    place = (target * inside).unsqueeze(-1)
    p = logp.exp()
    dlogp = torch.zeros_like(stats.logprobs) if grad_stats.dlogp is None else grad_stats.dlogp
    coefficient = -dlogp.unsqueeze(-1)
    of_target = -dlogp * torch.expm1(stats.logprobs)  # 1 - p, accurate also for p near 1
    if grad_stats.dentropy is not None:
        bounded = logp.clamp_(min=LEAST_LOGP).add_(stats.entropy.unsqueeze(-1))
        coefficient = coefficient - grad_stats.dentropy.unsqueeze(-1) * bounded
        own_bounded = bounded.gather(-1, place).squeeze(-1)
        of_target = of_target - grad_stats.dentropy * stats.logprobs.exp() * own_bounded
    gradient = p.mul_(coefficient)
    of_target = torch.where(inside, of_target, gradient.gather(-1, place).squeeze(-1))
    gradient.scatter_(-1, place, of_target.unsqueeze(-1))
    gradient = slope(gradient, transform, tanh)
    active = grad_stats.nonzero
    if active is not None:  # 0 * NaN would be NaN
        gradient.masked_fill_(~active.unsqueeze(-1), 0)
    return gradient


def _block_divergence(pair: Pair, divergence: Divergence) -> Tensor:
    """Return the (2, C) fp64 sums of the terms of some rows, and of ``logp_grad``."""
    logp, teacher_logp, _ = _logp_of(pair)
    return torch.stack(
        [x.sum(-1, dtype=torch.float64) for x in divergence.terms(logp, teacher_logp)]
    )


def _block_divergence_gradient(
    pair: Pair, divergence: Divergence, logp_grad_sum: Tensor, coefficient: Tensor
) -> Tensor:
    """Return the gradient of the student's raw logits for some rows, (C, V)."""
    logp, teacher_logp, tanh = _logp_of(pair)
    gradient = divergence.terms(logp, teacher_logp)[1]
    gradient = gradient - logp.exp() * logp_grad_sum.to(logp.dtype).unsqueeze(-1)
    gradient *= coefficient.unsqueeze(-1)
    gradient = slope(gradient, pair.student.transform, tanh)
    return gradient.masked_fill_((coefficient == 0).unsqueeze(-1), 0)  # 0 would not hide a NaN


def _logp_of(pair: Pair) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities (C, V) of both, and the tanh of the student's softcap, if any."""
    scores, tanh = transformed(pair.student.logits, pair.student.transform)
    teacher_scores, _ = transformed(pair.teacher.logits, pair.teacher.transform)
    wide = torch.promote_types(scores.dtype, teacher_scores.dtype)
    pairs = (scores, pair.lse), (teacher_scores, pair.teacher_lse)
    logp, teacher_logp = (_relative_to_(x.to(wide), lse).clamp_(min=LEAST_LOGP) for x, lse in pairs)
    return logp, teacher_logp, tanh


def _relative_to_(scores: Tensor, lse: Tensor) -> Tensor:
    """Subtract (C,) fp64 ``lse`` from (C, V) scores, in place, with all of its digits."""
    anchor = lse.to(scores.dtype)
    rest = (lse - anchor).to(scores.dtype)
    return scores.sub_(anchor.unsqueeze(-1)).sub_(rest.unsqueeze(-1))
