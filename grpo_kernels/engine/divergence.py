"""The divergence of a head's rows from a teacher's, one chunk of both heads' logits at a time.

As soon as both tiles are in memory, a row's gradient is known up to the loss's factor. So one pass
computes everything: three GEMMs for the student's head, one for the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from grpo_kernels.engine.autograd import Forward, HeadCall, Tensors, apply
from grpo_kernels.engine.chunked_loop import (
    Chunk,
    chunk_height,
    chunked_loop,
    form_logits,
    new_tile,
)
from grpo_kernels.engine.explain import backend_reasons, divergence_lines, fingerprint
from grpo_kernels.engine.gradients import GradientSums, scaled_
from grpo_kernels.engine.logprobs_plan import CallPlan
from grpo_kernels.engine.masked_rows import scores_at
from grpo_kernels.engine.options import RunOptions
from grpo_kernels.engine.retry_on_oom import retry_on_oom
from grpo_kernels.engine.route import Route, choose_route
from grpo_kernels.engine.rows import Gradients, Needs, Rows, ranges
from grpo_kernels.head import (
    VocabShard,
    matmul_precision,
    stats_dtype,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class DivergencePlan(CallPlan):
    """The plan of a ``linear_divergence`` call. Print it to see what runs, and why.

    Attributes:
        backend: name of the backend.
        precision: precision of the GEMMs over the vocabulary.
        gemms: number of GEMMs over the student's vocabulary, forward and backward together.
        chunks: the ranges of rows whose logits are in memory at a time.
        fingerprint: a line to log with a run; runs with different ones may differ bitwise.
        reasons: why the call runs as planned, a sentence each.
        route, teacher: backend and tile of the student's rows and of the teacher's (None for a
            teacher given by its top k ids). They and the other attributes are internal.
    """

    teacher: Route | None  # None: the teacher is given by its top k ids
    divergence: Divergence

    @property
    def routes(self) -> list[Route]:
        """The routes of the student's rows, and of the teacher's if it has hidden states."""
        return [self.route] if self.teacher is None else [self.route, self.teacher]

    @property
    def chunks(self) -> list[slice]:
        """The ranges of rows whose logits are in memory at a time."""
        tile_rows = min(route.tile_rows for route in self.routes)
        return ranges(self.tokens, chunk_height(self.tokens, tile_rows, self.route.block))

    def smaller(self) -> DivergencePlan | None:
        """Return a plan with smaller tiles; None in the cases of :meth:`Route.smaller`."""
        route, *teacher = (route.smaller() for route in self.routes)
        if route is None or None in teacher:
            return None
        return replace(self, route=route, teacher=teacher[0] if teacher else None)

    @property
    def advice(self) -> str:
        """The setting that gives these tiles."""
        return (
            f"max_workspace_bytes={sum(route.tile_rows * route.row_bytes for route in self.routes)}"
        )

    @property
    def gemms(self) -> int:
        """The GEMMs over the student's vocabulary, forward and backward together."""
        return 1 + self.needs.hidden + self.needs.weight

    @cached_property
    def fingerprint(self) -> str:
        """A line to log with a run: runs with different fingerprints may differ bitwise."""
        return fingerprint(self.route, self.head, f"{self.divergence}")

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the call runs as planned, a sentence each."""
        return tuple(backend_reasons(self.route))

    @property
    def lines(self) -> list[str]:
        """The plan as a table."""
        return divergence_lines(self)


def plan_divergence(
    rows: Rows, teacher: Rows | TopK, options: RunOptions, divergence: Divergence
) -> DivergencePlan:
    """Choose how these rows run; the workspace covers both tiles.

    Raises:
        ValueError: the backend cannot run as requested, or the workspace is too small.
    """
    both = isinstance(teacher, Rows)
    asked = options.max_workspace_bytes
    if both and asked is not None:
        options = replace(options, max_workspace_bytes=asked // 2)
    routes = [
        choose_route(each.hidden.dtype, each.head, options, tiled=True)
        for each in (rows, teacher)
        if isinstance(each, Rows)
    ]
    if both and asked is None and not options.batch_invariant:  # there, tiles have a fixed height
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
    """Compute the differentiable () sum of ``weights`` times divergence, and the divergence and
    entropy (T,) of rows that all count."""
    if not plan.route.backend.has_tiles:
        divergence, entropy = reference_divergence(
            hidden=rows.hidden,
            head=rows.head,
            teacher=teacher if isinstance(teacher, TopK) else (teacher.hidden, teacher.head),
            precision=plan.precision,
            divergence=plan.divergence,
        )
        loss = (divergence * weights).sum(dtype=torch.float64).to(divergence.dtype)
        return loss, divergence.detach(), entropy.detach()
    return apply(_DivergenceCall(rows, teacher, weights, plan))


@dataclass(frozen=True)
class _DivergenceCall(HeadCall):
    rows: Rows
    teacher: Rows | TopK
    weights: Any  # (T,) tensor; None while autograd holds it
    plan: DivergencePlan
    name = "linear_divergence"

    @property
    def inputs(self) -> Tensors:
        return self.rows.inputs

    @property
    def guarded(self) -> Tensors:
        return (self.weights, *self.teacher.inputs)

    def without_tensors(self) -> _DivergenceCall:
        rows = self.rows.without_inputs()
        plan = replace(self.plan, head=rows.head)
        return _DivergenceCall(rows, self.teacher.without_inputs(), None, plan)

    def with_tensors(self, inputs: Sequence[Any], guarded: Sequence[Any]) -> _DivergenceCall:
        rows = self.rows.with_inputs(*inputs)
        weights, *of_teacher = guarded
        plan = replace(self.plan, head=rows.head)
        return _DivergenceCall(rows, self.teacher.with_inputs(*of_teacher), weights, plan)

    def forward(self) -> Forward:
        """Compute loss, divergence, entropy and gradients; retry out-of-memory in smaller tiles."""
        outputs, gradients = retry_on_oom(
            lambda plan: _one_pass(plan, self.rows, self.teacher, self.weights), self.plan
        )
        return Forward(outputs, constants=outputs[1:], gradients=gradients)

    def backward(
        self, saved: Sequence[Any], gradients: Gradients | None, grad_outputs: Sequence[Any]
    ) -> Gradients:
        unscaled = gradients or self.forward().gradients
        assert unscaled is not None
        return scaled_(unscaled, grad_outputs[0], self.inputs, self.plan.route.backend)


def _one_pass(
    plan: DivergencePlan, rows: Rows, teacher: Rows | TopK, weights: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Gradients]:
    route = plan.route
    chunks = plan.chunks
    sums = GradientSums(rows, plan.needs, len(chunks)) if plan.needs.any else None
    compare = _comparison(plan, teacher, rows.head.shard)
    divergences = list[Tensor]()

    def consume(chunk: Chunk) -> None:
        divergence, write_gradient = compare(chunk)
        divergences.append(divergence)
        if sums is not None:
            coefficient = sums.scaled(StatsGrad(weights[chunk.part])).dlogp
            assert coefficient is not None
            dlogits = output_view(chunk.logits, chunk.rows.hidden.dtype)
            write_gradient(coefficient, dlogits)
            sums.add(TileGradient(dlogits), chunk.rows, chunk.part)

    with matmul_precision(route.device, route.precision):
        stats = chunked_loop(rows, route, chunks, consume=consume)
        gradients = Gradients() if sums is None else sums.finish()
    wide = stats_dtype(route.dtype)
    divergence = weights.new_zeros(0, dtype=torch.float64)
    if divergences:
        divergence = torch.cat(divergences)
    loss = (divergence * weights).sum().to(wide)
    return (loss, divergence.to(wide), stats.entropy), gradients


# writes the gradient of a chunk's divergences times (C,) coefficients into (C, V) dlogits
WriteGradient = Callable[[Tensor, Tensor], object]
Comparison = Callable[[Chunk], tuple[Tensor, WriteGradient]]


def _comparison(plan: DivergencePlan, teacher: Rows | TopK, shard: VocabShard | None) -> Comparison:
    """Return the function that compares a chunk with the teacher's rows."""
    if isinstance(teacher, TopK):
        return partial(_compare_top_k, plan, teacher, shard)
    assert plan.teacher is not None
    height = max((part.stop - part.start for part in plan.chunks), default=0)
    buffer = new_tile(plan.teacher, height)
    return partial(_compare_logits, plan, teacher.local().ready(), buffer, shard)


def _compare_logits(
    plan: DivergencePlan,
    teacher: Rows,
    buffer: Tensor,
    shard: VocabShard | None,
    chunk: Chunk,
) -> tuple[Tensor, WriteGradient]:
    """Compare a chunk with the teacher's logits, which are computed in ``buffer``.

    Return (C,) divergences, and the function that writes their gradient.
    """
    assert plan.teacher is not None
    backend = plan.route.backend
    divergence = plan.divergence
    of_teacher = form_logits(
        rows=teacher, part=chunk.part, buffer=buffer, route=plan.teacher, outputs=OutputSpec()
    )
    pair = Pair(chunk.tile, of_teacher.tile, chunk.stats.lse, of_teacher.stats.lse)
    sums = backend.divergence_sums(pair, divergence)
    if shard is not None:
        sums = shard.gather(sums).sum(0)
    divergences, logp_grad_sum = sums

    def write_gradient(coefficient: Tensor, dlogits: Tensor) -> None:
        backend.divergence_gradient_(
            pair=pair,
            divergence=divergence,
            logp_grad_sum=logp_grad_sum,
            coefficient=coefficient,
            out=dlogits,
        )

    return divergences, write_gradient


def _compare_top_k(
    plan: DivergencePlan, teacher: TopK, shard: VocabShard | None, chunk: Chunk
) -> tuple[Tensor, WriteGradient]:
    """Compare a chunk with the teacher's first k ids; all other ids count as one, the tail.

    Return (C,) divergences, and the function that writes their gradient. Let q_i be the student's
    probability of a listed id or of the tail, and g_i the derivative of the divergence with respect
    to log q_i. The gradient with respect to the score of a listed id is ``g_i - q_i sum_k g_k``.
    Each id j of the tail gets its share ``p_j / q_tail`` of the tail's gradient.
    """
    backend = plan.route.backend
    stats = chunk.stats
    teacher = teacher.select(chunk.part)
    ids = teacher.indices
    own = torch.ones_like(ids, dtype=torch.bool)
    place = torch.arange(ids.numel(), device=ids.device)  # of the ids; no wait for a GPU
    if shard is not None:
        ids = ids - shard.start
        own = shard.owns(ids)
        place = place[own.flatten()]
    rows = place // ids.shape[1]
    slots = place % ids.shape[1]
    columns = ids.flatten()[place]
    listed, slopes = scores_at(chunk.tile, rows, columns)
    scores = torch.full(ids.shape, -torch.inf, dtype=torch.float64, device=ids.device)
    scores[rows, slots] = listed
    tail = _lse_of_tail(plan, chunk, (rows, columns), own.sum(1))
    if shard is not None:  # the owner has the score of an id; the tails add up
        of_ranks = shard.gather(torch.cat([scores, tail[:, None]], 1))
        scores = of_ranks[..., :-1].amax(0)
        tail = of_ranks[..., -1].logsumexp(0)
    # normalized by their own sum: near 1 this keeps more digits than the row's lse
    logp = torch.cat([scores, tail[:, None]], 1).log_softmax(-1).clamp(min=LEAST_LOGP)
    divergences, grads = plan.divergence.terms(logp, teacher.with_tail)
    total = grads.sum(-1)
    probabilities = logp.exp()

    def write_gradient(coefficient: Tensor, dlogits: Tensor) -> None:
        wide = coefficient.to(torch.float64)
        weightless = coefficient == 0
        # the row kernel writes ``dlogp (1[j = target] - exp(z_j - lse))``: without a target, with
        # the tail's lse and minus its gradient, this is each id's share of the tail's gradient
        dlogp = wide * (probabilities[:, -1] * total - grads[:, -1])
        dlogp = dlogp.masked_fill(weightless, 0).to(stats.logprobs.dtype)
        no_target = chunk.tile._replace(target=torch.full_like(chunk.rows.target, -1))
        lse = torch.where(tail == -torch.inf, stats.lse, tail)  # an empty tail has no shares
        of_tail = stats._replace(logprobs=torch.full_like(stats.logprobs, LEAST_LOGP), lse=lse)
        backend.dlogits_(no_target, of_tail, StatsGrad(dlogp), dlogits)
        of_ids = wide[:, None] * (grads - probabilities * total[:, None])[:, :-1]
        of_ids = (of_ids.flatten()[place] * slopes).masked_fill(weightless[rows], 0)
        dlogits[rows, columns] = of_ids.to(dlogits.dtype)

    return divergences.sum(-1), write_gradient


def _lse_of_tail(
    plan: DivergencePlan, chunk: Chunk, place: tuple[Tensor, Tensor], count: Tensor
) -> Tensor:
    """Return the (C,) logsumexp of the unlisted scores, by summation instead of a difference."""
    tile = chunk.tile
    listed = chunk.logits[place]
    chunk.logits[place] = -torch.inf
    first = tile._replace(target=torch.zeros_like(tile.target))
    lse: Tensor = plan.route.backend.stats(first, False).lse
    chunk.logits[place] = listed
    cap = tile.transform.softcap
    if cap is not None:  # it maps -inf to -cap, as if listed ids were in the tail with that score
        least = -cap / tile.transform.temperature
        lse = lse + torch.log1p(-count * (least - lse).exp())
    return torch.where(count < tile.logits.shape[1], lse, -torch.inf)
