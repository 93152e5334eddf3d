"""The divergence of a head's rows from a teacher's: both heads' logits of a chunk at a time.

A row's gradient is known up to the loss's one factor as soon as both tiles are there, so one pass
makes all of it: three products for the student's head, one for the teacher's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import (
    LEAST_LOGP,
    Divergence,
    OutputSpec,
    Pair,
    StatsGrad,
    TileGradient,
    TopK,
    output_view,
    reference_divergence,
)
from grpo_kernels.engine.chunked_loop import Chunk, chunk_height, chunked_loop, formed, new_tile
from grpo_kernels.engine.differentiable import INPUTS
from grpo_kernels.engine.gradients import GradientSums, scaled_
from grpo_kernels.engine.logprobs_plan import LogprobsPlan, SavedForBackward
from grpo_kernels.engine.masked_rows import scores_at
from grpo_kernels.engine.options import RunOptions
from grpo_kernels.engine.retry_on_oom import retry_on_oom
from grpo_kernels.engine.route import Route, choose_route
from grpo_kernels.engine.rows import Gradients, Needs, Rows, ranges
from grpo_kernels.head import (
    VocabShard,
    check_plain,
    first_derivative_only,
    matmul_precision,
    stats_dtype,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class DivergencePlan(LogprobsPlan):
    """The plan of a ``linear_divergence`` call. Print it to see what runs, and why."""

    teacher: Route | None  # None: its ids and their log-probabilities are given
    divergence: Divergence

    @property
    def routes(self) -> list[Route]:
        """The ways of the student's rows, and of the teacher's if it has hidden states."""
        return [self.route] if self.teacher is None else [self.route, self.teacher]

    @property
    def chunks(self) -> list[slice]:
        """The ranges of rows whose logits are there at once."""
        tile_rows = min(route.tile_rows for route in self.routes)
        return ranges(self.tokens, chunk_height(self.tokens, tile_rows, self.route.block))

    def smaller(self) -> DivergencePlan | None:
        """Return a plan with smaller tiles; None as for :meth:`Route.smaller`."""
        route, *teacher = (route.smaller() for route in self.routes)
        if route is None or None in teacher:
            return None
        return replace(self, route=route, teacher=teacher[0] if teacher else None)

    @property
    def advice(self) -> str:
        """What to set for these tiles."""
        return (
            f"max_workspace_bytes={sum(route.tile_rows * route.row_bytes for route in self.routes)}"
        )

    @cached_property
    def saving(self) -> SavedForBackward:
        """Nothing: gradients are made while the logits are there."""
        return SavedForBackward(gemms=1 + self.needs.hidden + self.needs.weight)

    @cached_property
    def fingerprint(self) -> str:
        """A line to log with a run: where it differs, so may the bits."""
        return self.route.fingerprint(self.head, f"{self.divergence}")

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why it is so, a sentence each."""
        return tuple(self.route.why_backend)

    def _lines(self) -> list[str]:
        passes = f"{self.saving.gemms} GEMMs in one pass, {self.forward}"
        return [
            f"backend   {self.backend}",
            f"student   {passes}, precision={self.precision!r}",
            f"teacher   {'none' if self.teacher is None else f'1, {self.teacher.forward}'}",
            f"numerics  {self.fingerprint}",
        ]


def plan_divergence(
    rows: Rows, teacher: Rows | TopK, options: RunOptions, divergence: Divergence
) -> DivergencePlan:
    """Choose for so many rows; the workspace is that of both tiles.

    Raises:
        ValueError: the backend cannot run, or not as asked for; the workspace is too small.
    """
    both, asked = isinstance(teacher, Rows), options.max_workspace_bytes
    if both and asked is not None:
        options = replace(options, max_workspace_bytes=asked // 2)
    routes = [
        choose_route(each.hidden.dtype, each.head, options, tiled=True)
        for each in (rows, teacher)
        if isinstance(each, Rows)
    ]
    if both and asked is None and not options.batch_invariant:  # whose tiles have one height
        routes = [replace(route, tile_rows=max(1, route.tile_rows // 2)) for route in routes]
    return DivergencePlan(
        head=rows.head,
        route=routes[0],
        teacher=routes[1] if both else None,
        needs=Needs.of(rows.inputs),
        tokens=rows.count,
        divergence=divergence,
    )


def differentiable_divergence(
    rows: Rows, teacher: Rows | TopK, weights: Tensor, plan: DivergencePlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the () sum of ``weights`` times divergence, which autograd can differentiate, and
    divergence and entropy (T,) of rows that are all counted."""
    if not plan.route.backend.has_tiles:
        given = teacher if isinstance(teacher, TopK) else (teacher.hidden, teacher.head)
        of_student = rows.hidden, rows.head
        divergence, entropy = reference_divergence(
            *of_student, given, plan.precision, plan.divergence
        )
        loss = (divergence * weights).sum(dtype=torch.float64).to(divergence.dtype)
        return loss, divergence.detach(), entropy.detach()
    check_plain(**dict(zip(INPUTS, rows.inputs, strict=True)))
    return _Divergence.apply(plan, rows, teacher, weights, *rows.inputs)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Any, rows: Rows, teacher: Any, weights: Tensor, *inputs: Any
    ) -> Any:
        found, gradients = _run(plan, rows, teacher, weights)
        ctx.rows = rows.without_inputs()
        ctx.plan = replace(plan, head=ctx.rows.head)
        ctx.teacher = teacher.without_inputs()
        ctx.gradients = gradients
        ctx.result_of = "linear_divergence"
        # saved for a second backward, which autograd refuses after a change in place
        ctx.save_for_backward(*inputs, weights, *teacher.inputs)
        ctx.mark_non_differentiable(*found[1:])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: Any, dloss: Tensor | None, *others: Any) -> Any:
        if dloss is None:
            return (None,) * (4 + len(INPUTS))
        inputs = saved[: len(INPUTS)]
        # the first backward takes the gradients over; a second computes them again
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            weights, *of_teacher = saved[len(INPUTS) :]
            rows = ctx.rows.with_inputs(*inputs)
            teacher = ctx.teacher.with_inputs(*of_teacher)
            gradients = _run(replace(ctx.plan, head=rows.head), rows, teacher, weights)[1]
        gradients = scaled_(gradients, dloss, inputs, ctx.plan.route.backend)
        pairs = zip(gradients, inputs, strict=True)
        return None, None, None, None, *(None if g is None else g.to(x.dtype) for g, x in pairs)


def _run(
    plan: DivergencePlan, rows: Rows, teacher: Rows | TopK, weights: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Gradients]:
    """Compute loss, divergence, entropy and gradients, with as much memory as there is."""
    return retry_on_oom(lambda plan: _one_pass(plan, rows, teacher, weights), plan)


def _one_pass(
    plan: DivergencePlan, rows: Rows, teacher: Rows | TopK, weights: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Gradients]:
    route, chunks = plan.route, plan.chunks
    sums = GradientSums(rows, plan.needs, len(chunks)) if plan.needs.any else None
    made: Any = _OfTopK if isinstance(teacher, TopK) else _OfLogits
    compare, found = made(plan, teacher, rows.head.shard), []

    def take(chunk: Chunk) -> None:
        part = chunk.rows.part
        divergence, gradient_ = compare(chunk)
        found.append(divergence)
        if sums is not None:
            coefficient = sums.scaled(StatsGrad(weights[part])).dlogp
            out = output_view(chunk.logits, chunk.rows.hidden.dtype)
            sums.add(TileGradient(gradient_(coefficient, out)), chunk.rows)

    with matmul_precision(route.device, route.precision):
        stats = chunked_loop(rows, route, chunks, take=take)
        gradients = Gradients() if sums is None else sums.finish()
    wide = stats_dtype(route.dtype)
    divergence = torch.cat(found) if found else weights.new_zeros(0, dtype=torch.float64)
    loss = (divergence * weights).sum().to(wide)
    return (loss, divergence.to(wide), stats.entropy), gradients


class _OfLogits:
    """Compare chunks with a teacher's, whose logits are formed beside theirs."""

    def __init__(self, plan: DivergencePlan, teacher: Rows, shard: VocabShard | None) -> None:
        assert plan.teacher is not None
        self._plan, self._route, self._shard = plan, plan.teacher, shard
        self._teacher = teacher.local().ready()
        height = max((part.stop - part.start for part in plan.chunks), default=0)
        self._buffer = new_tile(plan.teacher, height)

    def __call__(self, chunk: Chunk) -> Any:
        """Return (C,) divergences, and what writes their gradient, times coefficients."""
        backend, divergence = self._plan.route.backend, self._plan.divergence
        rows = self._teacher.narrow(chunk.rows.part)
        teacher = formed(rows, self._buffer, self._route, OutputSpec())
        pair = Pair(chunk.tile, teacher.tile, chunk.stats.lse, teacher.stats.lse)
        found = backend.divergence_sums(pair, divergence)
        if self._shard is not None:
            found = self._shard.gather(found).sum(0)
        each, pull = found
        return each, lambda coefficient, out: backend.divergence_gradient_(
            pair, divergence, pull, coefficient, out
        )


class _OfTopK:
    """Compare chunks with a teacher's first k ids and the tail."""

    def __init__(self, plan: DivergencePlan, teacher: TopK, shard: VocabShard | None) -> None:
        self._plan, self._teacher, self._shard = plan, teacher, shard

    def __call__(self, chunk: Chunk) -> Any:
        """Return (C,) divergences, and what writes their gradient, times coefficients."""
        backend, stats, shard = self._plan.route.backend, chunk.stats, self._shard
        teacher = self._teacher.at(chunk.rows.part)
        ids = teacher.indices if shard is None else teacher.indices - shard.start
        own = torch.ones_like(ids, dtype=torch.bool) if shard is None else shard.owns(ids)
        # of all ids without a wait for the device
        mine = torch.arange(ids.numel(), device=ids.device)
        mine = mine if shard is None else mine[own.flatten()]
        place = mine // ids.shape[1], ids.flatten()[mine]
        listed, slopes = scores_at(chunk.tile, *place)
        scores = torch.full(ids.shape, -torch.inf, dtype=torch.float64, device=ids.device)
        scores[place[0], mine % ids.shape[1]] = listed
        tail = self._lse_of_tail(chunk, place, own.sum(1))
        if shard is not None:  # the owner's of each id, and the sum of the tails
            everyone = shard.gather(torch.cat([scores, tail[:, None]], 1))
            scores, tail = everyone[..., :-1].amax(0), everyone[..., -1].logsumexp(0)
        # by their own sum: near 1 they have more digits than beside the row's
        logp = torch.cat([scores, tail[:, None]], 1).log_softmax(-1).clamp(min=LEAST_LOGP)
        each, pulls = self._plan.divergence.terms(logp, teacher.with_tail)
        pull, probabilities = pulls.sum(-1), logp.exp()

        def gradient_(coefficient: Tensor, out: Tensor) -> Tensor:
            # of the ids in the tail: their share of it, however small it is, times a factor a row
            wide, weightless = coefficient.to(torch.float64), coefficient == 0
            dlogp = wide * (probabilities[:, -1] * pull - pulls[:, -1])
            dlogp = dlogp.masked_fill(weightless, 0).to(stats.logprobs.dtype)
            nowhere = chunk.tile._replace(target=torch.full_like(chunk.rows.target, -1))
            lse = torch.where(tail == -torch.inf, stats.lse, tail)  # an empty tail has no shares
            of_tail = stats._replace(logprobs=torch.full_like(stats.logprobs, LEAST_LOGP), lse=lse)
            backend.dlogits_(nowhere, of_tail, StatsGrad(dlogp), out)
            of_ids = wide[:, None] * (pulls - probabilities * pull[:, None])[:, :-1]
            of_ids = (of_ids.flatten()[mine] * slopes).masked_fill(weightless[place[0]], 0)
            out[place] = of_ids.to(out.dtype)
            return out

        return each.sum(-1), gradient_

    def _lse_of_tail(self, chunk: Chunk, place: tuple[Tensor, Tensor], count: Tensor) -> Tensor:
        """Return the (C,) logsumexp of the scores that are not listed: their sum, no difference."""
        tile, listed = chunk.tile, chunk.logits[place]
        chunk.logits[place] = -torch.inf
        first = tile._replace(target=torch.zeros_like(tile.target))
        lse: Tensor = self._plan.route.backend.stats(first, False).lse
        chunk.logits[place] = listed
        cap = tile.transform.softcap
        if cap is not None:  # to which the transform brings -inf: as if each were one more such id
            least = -cap / tile.transform.temperature
            lse = lse + torch.log1p(-count * (least - lse).exp())
        return torch.where(count < tile.logits.shape[1], lse, -torch.inf)
