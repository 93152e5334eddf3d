"""Plan: which schedule runs a loss, decided before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.engine import (
    ENTRY_ROWS,
    OF_ENTROPY,
    OF_MASK,
    CallPlan,
    LogprobsPlan,
    Needs,
    Route,
    RunOptions,
    SavedForBackward,
    WeightGrad,
    choose_route,
    fingerprint,
    needs_of_gemms,
    row_chunks,
)
from grpo_kernels.head import Head, stats_dtype
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule.chunk_loss import choose_method
from grpo_kernels.schedule.explain import loss_lines, loss_reasons
from grpo_kernels.schedule.rows_with_gradient import RowsWithGradient

# Rows per chunk at which adding to an fp32 (V, D) sum after each chunk costs as much as computing
# the logits a second time: about four times the device's operations per byte. For 16-bit inputs; in
# fp32 the sum is cheap compared with the GEMMs. With fewer rows, two passes are faster: on a CPU at
# all sizes that were measured, up to 512; the GPU's number follows from the data sheets.
_FEWEST_CHUNK_ROWS = {"cpu": 1 << 30, "cuda": 768}
_BLOCK_ROWS = 256  # tiles for one pass have a multiple of this many rows
# Exponentials of all rows are kept for up to this many times the hidden size: twice the memory of
# the fp32 sum of the weight's gradient, which then is a single GEMM. Above it, a chunk has the rows
# of a whole wave of a GPU.
KEPT_DEPTHS = 4
# Operations of the gradients' GEMMs from which waiting for a number of rows costs a few percent.
_WORTH_A_WAIT = 4e12
_FEWER_ROWS = 4  # after an out-of-memory error, chunks have this many times fewer rows


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(CallPlan):
    """The plan of a ``linear_policy_loss`` call. Print it to see what runs, and why.

    Attributes:
        backend: name of the backend.
        precision: precision of the GEMMs over the vocabulary.
        schedule: ``"one_pass"`` or ``"two_pass"``.
        why_two_passes: why one pass cannot run; None if it can.
        tokens: number of rows that can have a gradient.
        chunks: the ranges of these rows in one pass; empty for two passes.
        tile_rows: rows of logits in memory at a time.
        workspace_bytes: bytes of these logits.
        extra_bytes: approximate peak bytes in addition to inputs and gradients.
        scope: what a token's loss depends on: "token", "prefix", "sequence" or "batch".
        fingerprint: a line to log with a run; runs with different ones may differ bitwise.
        reasons: why the call runs as planned, a sentence each.
        route: backend, forward and tile. It and the other attributes are internal.
    """

    batch: TokenBatch  # every valid token
    config: LossConfig
    active: RowsWithGradient  # the tokens that can have a gradient
    schedule: str  # "one_pass" | "two_pass"
    chunks: tuple[slice, ...]  # of the rows that can have a gradient; empty for two_pass
    method: str  # how the loss of a chunk is computed, in words
    why_two_passes: str | None  # why one_pass cannot run
    keeps: bool = False  # one_pass keeps exponentials of all rows; the backward multiplies them
    is_smaller: bool = False  # retried after an out-of-memory error

    @cached_property
    def stats(self) -> LogprobsPlan:
        """The plan for the statistics of the rows with a gradient."""
        why_not = None
        if self.options.bounded is None:
            why_not = _why_exact(self.batch, self.config)
        return LogprobsPlan(
            head=self.head,
            route=self.route,
            needs=self.needs,
            tokens=self.tokens,
            weight_grad=self.weight_grad,
            masked=self.batch.sampling_mask is not None,
            why_recompute=why_not,
        )

    @property
    def scope(self) -> str:
        """What a token's loss depends on: "token", "prefix", "sequence" or "batch"."""
        return self.config.scope(self.batch.rollout_logprobs is not None)

    @property
    def with_gradient(self) -> bool:
        """Whether one pass computes the gradient of log-probabilities along with statistics."""
        return self.schedule == "one_pass" and _of_logprobs(self.route, self.batch, self.config)

    @property
    def leaves_out(self) -> bool:
        """Whether the backward multiplies only the exponentials of rows with a gradient.

        On a GPU this waits for their number. So it does this only if the loss may clip or gate, if
        the wait is short compared with the GEMMs, and not during graph capture.
        """
        batch = self.batch
        config = self.config
        if not self.keeps:
            return False
        if host.reading_is_free(batch.target):
            return True
        off_policy = batch.old_logprobs is not None or batch.rollout_logprobs is not None
        may_gate = off_policy or config.top_entropy_quantile < 1
        operations = 4 * self.tokens * math.prod(self.head.weight.shape)
        worth = may_gate and operations >= _WORTH_A_WAIT
        return worth and not torch.cuda.is_current_stream_capturing()

    @property
    def tile_rows(self) -> int:
        """Rows of logits in memory at a time."""
        if self.route.fixed_rows is not None:
            return self.route.fixed_rows
        tokens = self.active.batch.num_tokens
        size = self.route.tile_rows if self.route.backend.has_tiles else tokens
        whole = max(1, min(size, tokens))
        return max((part.stop - part.start for part in self.chunks), default=whole)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the logits in memory at a time."""
        return self.tile_rows * self.route.row_bytes

    @property
    def extra_bytes(self) -> int:
        """Approximate peak bytes in addition to inputs and gradients."""
        wide = stats_dtype(self.route.dtype)
        elements = math.prod(self.head.weight.shape)
        rows = self.tokens * self.head.weight.shape[1]
        if self.schedule == "two_pass":
            return self.workspace_bytes + rows * wide.itemsize
        if self.keeps:
            return self.workspace_bytes + rows * self.route.dtype.itemsize
        sums = self.needs_of_gemms.weight and len(self.chunks) > 1 and self.route.dtype != wide
        return self.workspace_bytes + sums * elements * wide.itemsize

    @property
    def forward_route(self) -> Route:
        """The route of the forward."""
        return self.route if self.schedule == "one_pass" else self.stats.forward_route

    @property
    def saved(self) -> SavedForBackward:
        """What the forward saves for the backward, or until its own end."""
        bounded = self.options.bounded
        saved = self.stats.saved
        if bounded is None or self.schedule == "two_pass":
            return saved
        # the logits are in memory for the weight's exact gradient
        return replace(saved, gemms=1 + (self.needs.weight and bounded.exact_weight))

    @cached_property
    def fingerprint(self) -> str:
        """A line to log with a run: runs with different fingerprints may differ bitwise."""
        return fingerprint(self.forward_route, self.head, self.schedule)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the call runs as planned, a sentence each."""
        return tuple(loss_reasons(self))

    @property
    def lines(self) -> list[str]:
        """The plan as a table."""
        return loss_lines(self)

    @property
    def advice(self) -> str:
        """The settings that give this plan."""
        forced = ["schedule='two_pass'"] if self.options.schedule == "two_pass" else []
        size = self.options.max_workspace_bytes
        return ", ".join(forced + ([f"max_workspace_bytes={size}"] if size is not None else []))

    def smaller(self) -> Plan | None:
        """Return a plan with less memory: one pass in smaller chunks, then two passes."""
        if self.schedule == "two_pass" or self.route.shard is not None:  # other ranks keep the plan
            return None
        rows = self.tile_rows // _FEWER_ROWS
        if rows and not self.is_smaller and self.route.fixed_rows is None:
            size = rows * self.route.row_bytes
            return self.with_options(replace(self.options, max_workspace_bytes=size))
        if self.options.schedule == "auto":
            return self.with_options(replace(self.options, schedule="two_pass"))
        return None

    def with_options(self, options: RunOptions) -> Plan | None:
        """Return the plan of the same call with other options; None if it cannot run."""
        try:
            plan = make_plan(
                dtype=self.route.dtype,
                head=self.head,
                batch=self.batch,
                config=self.config,
                options=options,
                active=self.active,
                needs=self.needs,
                weight_grad=self.weight_grad,
            )
        except ValueError:  # one_pass is forced, and sequences no longer fit
            return None
        return replace(plan, is_smaller=True)


def make_plan(
    *,
    dtype: torch.dtype,  # of the hidden states
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    active: RowsWithGradient,
    needs: Needs,
    weight_grad: WeightGrad,
) -> Plan:
    """Choose backend, schedule and chunks for the rows of ``active``.

    Raises:
        ValueError: the requested call cannot run.
    """
    if options.metric_rows == "active" and config.scope() == "batch":
        raise ValueError(
            "metric_rows: expected 'all' for a loss with a gate on the entropy of every token, "
            "got 'active'"
        )
    route = choose_route(dtype, head, options, tiled=batch.sampling_mask is not None)
    if weight_grad.main_grad is not None and not route.backend.has_tiles:
        raise ValueError("main_grad: expected None with the eager reference, got a buffer")
    tokens = active.batch.num_tokens
    schedule = options.schedule
    stored = _storing(route, batch, config) if needs.any else route
    by_gemms = needs_of_gemms(needs, options.bounded)
    summing = _summing(stored, head, by_gemms)
    keeps = schedule != "two_pass" and keeps_exponentials(summing, head, by_gemms, tokens)
    if keeps:
        rows = -(-tokens // _BLOCK_ROWS) * _BLOCK_ROWS
        summing = replace(summing, tile_rows=rows)
        chunks = [slice(0, tokens)]
        why_two = None
    else:
        chunks, why_two = _chunks(active.batch, config, summing)
    if schedule == "one_pass" and why_two is not None:
        raise ValueError(f"schedule: 'one_pass' cannot run: {why_two}")
    if schedule == "auto":
        costly = False
        if by_gemms.weight and len(chunks) > 1 and dtype.itemsize <= 2:
            fewest = _FEWEST_CHUNK_ROWS.get(route.device.type, 0)
            costly = tokens / (len(chunks) - 1) < fewest
        schedule = "two_pass" if why_two is not None or costly else "one_pass"
    bonus = options.bounded is not None and config.entropy_coef != 0 and needs.any
    if bonus and why_two is None and options.schedule == "auto":
        schedule = "one_pass"
    if bonus and (schedule == "two_pass" or batch.sampling_mask is not None):
        why = "with a sampling mask"
        if schedule == "two_pass":
            why = "in two passes" + (f" ({why_two})" if why_two else "")
        raise ValueError(
            f"backward: expected 'exact' for an entropy bonus {why}, got {options.backward!r}"
        )
    if schedule == "one_pass":
        route = summing
    return Plan(
        head=head,
        tokens=active.batch.num_tokens,
        batch=batch,
        config=config,
        active=active,
        needs=needs,
        weight_grad=weight_grad,
        route=route,
        schedule=schedule,
        chunks=tuple(chunks) if schedule == "one_pass" else (),
        method=choose_method(route.backend, active.batch, config),
        why_two_passes=why_two,
        keeps=keeps,
    )


def _why_exact(batch: TokenBatch, config: LossConfig) -> str | None:
    """Say why the loss has a gradient other than through log-probabilities; None if not."""
    if config.entropy_coef != 0:
        return OF_ENTROPY
    return OF_MASK if batch.sampling_mask is not None else None


def _summing(route: Route, head: Head, needs: Needs) -> Route:
    """Return the route of one pass, with a larger default tile if dweight is summed.

    The tile may use the memory that rounding the sum needs later, V * D elements of the inputs'
    dtype: then fewer chunks add to the sum, and the peak memory is hardly higher. On a GPU the tile
    has enough rows to hide the addition behind its GEMM; a CPU has one chunk, or two passes.
    """
    options = route.options
    size = route.dtype.itemsize
    if not needs.weight or options.max_workspace_bytes is not None or options.batch_invariant:
        return route
    if size > 2:  # nothing is rounded, and the addition is cheap compared with the GEMMs
        return route
    rows = route.tile_rows + head.weight.shape[1] * size // route.tile_dtype.itemsize
    if route.exponentials:
        rows = max(head.weight.shape[1], ENTRY_ROWS)
    elif route.device.type != "cpu":
        rows = max(rows, _FEWEST_CHUNK_ROWS["cuda"])
    return replace(route, tile_rows=max(route.tile_rows, rows // _BLOCK_ROWS * _BLOCK_ROWS))


def _of_logprobs(route: Route, batch: TokenBatch, config: LossConfig) -> bool:
    """Return whether one pass can compute statistics and the gradient of logprobs together."""
    return route.reads_once and _why_exact(batch, config) is None


def _storing(route: Route, batch: TokenBatch, config: LossConfig) -> Route:
    """Return the route with exponentials instead of logits in its tiles, if there is one."""
    if not route.stores or not _of_logprobs(route, batch, config):
        return route
    return route.storing(0 if route.options.bounded is None else ENTRY_ROWS)


def keeps_exponentials(route: Route, head: Head, needs: Needs, tokens: int) -> bool:
    """Return whether one pass keeps the exponentials of all rows for its backward.

    It does if the head has a gradient, which chunks would have to sum in fp32, and if they fit into
    ``max_workspace_bytes`` and ``activation_bytes``; by default if the number of rows is at most
    four times the hidden size.
    """
    if not route.exponentials or not needs.weight or not tokens:
        return False
    limits = route.options.max_workspace_bytes, route.options.activation_bytes
    if limits == (None, None):
        return tokens <= KEPT_DEPTHS * head.weight.shape[1]
    size = -(-tokens // _BLOCK_ROWS) * _BLOCK_ROWS * route.row_bytes
    return all(limit is None or size <= limit for limit in limits)


def _chunks(batch: TokenBatch, config: LossConfig, route: Route) -> tuple[list[slice], str | None]:
    """Return the chunks of one_pass, or why it cannot run."""
    scope = config.scope(batch.rollout_logprobs is not None)
    if route.why_no_gradients is not None:
        return [], route.why_no_gradients
    if scope == "batch":
        return [], "a gate of this loss needs the entropy of the whole batch first"
    size = route.tile_rows
    if scope == "token":
        return row_chunks(batch.num_tokens, route), None
    if batch.sequence_group is not None:
        return [], "in a sequence_group, sums over sequences need every rank's forward first"
    longest = max(batch.lengths, default=0)
    if longest > size:
        return [], f"a sequence of {longest} tokens does not fit into a tile of {size} rows"
    return sequence_chunks(batch.lengths, size), None


def sequence_chunks(lengths: tuple[int, ...], size: int) -> list[slice]:
    """Cut rows into ranges of at most ``size`` that end where sequences end."""
    chunks = []
    start = 0
    stop = 0
    for length in lengths:
        if stop + length - start > size:
            chunks.append(slice(start, stop))
            start = stop
        stop += length
    if stop > start:
        chunks.append(slice(start, stop))
    return chunks
