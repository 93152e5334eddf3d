"""Which schedule runs a loss, and why: decided before any work, printed by ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import Transform
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.engine.fingerprint import fingerprint
from grpo_kernels.engine.route import Path, choose_path
from grpo_kernels.engine.sweep import row_chunks
from grpo_kernels.head.checks import check_workspace, prepare_head
from grpo_kernels.head.head import Head, logits_dtype
from grpo_kernels.head.lora import HeadLoRA
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule.active import active_rows, rows_left_out
from grpo_kernels.schedule.loss_stage import choose_middle
from grpo_kernels.tools.estimate import cost

SCHEDULES = ("auto", "one_pass", "two_pass")
METRICS = ("all", "active")


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """How the head's products are computed; exactness depends on ``precision`` alone."""

    precision: str = "fp32"
    backend: str = "auto"
    schedule: str = "auto"
    max_workspace_bytes: int | None = None
    batch_invariant: bool = False
    metrics: str = "all"  # which rows are measured

    def __post_init__(self) -> None:
        check_workspace(self.max_workspace_bytes)
        if self.metrics not in METRICS:
            raise ValueError(f"metrics: expected one of {', '.join(METRICS)}; got {self.metrics!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule: expected one of {', '.join(SCHEDULES)}; got {self.schedule!r}"
            )


@dataclass(frozen=True)
class Plan:
    """What will run."""

    backend: str
    schedule: str  # "one_pass" | "two_pass"
    scope: str  # "token" | "sequence" | "batch"
    precision: str
    logits_dtype: torch.dtype
    tile_rows: int
    workspace_bytes: int
    chunks: tuple[slice, ...]  # of the rows that get a gradient; empty for two_pass
    middle: str  # a MiddleChoice.kind
    path: Path  # how statistics are formed
    fingerprint: str  # of all that the numerics depend on; see logprob/fingerprint.py
    costs: cost.Costs | None  # predicted, of both schedules; None where there is no choice
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"backend   {self.backend}",
            f"schedule  {self.schedule} (scope of the loss: {self.scope})",
            f"logits    {self.logits_dtype}, precision={self.precision!r}",
            f"tile      {self.tile_rows} rows, {self.workspace_bytes / 2**20:.1f} MiB",
            f"numerics  {self.fingerprint}",
        ]
        if self.costs is not None:
            lines.insert(2, f"cost      {self.costs}")
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons)])


def make_plan(
    hidden: Tensor,  # (T, D)
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    settings: HeadSettings,
    forward_only: int = 0,
) -> Plan:
    """Chooses backend, schedule and chunks for the rows of ``batch``.

    ``forward_only`` further rows get no gradient.
    """
    columns, precision = head.weight.shape[0], settings.precision
    path = _path(hidden, head, batch, settings)
    choice = path.choice
    scope = config.scope(batch.rollout_logprobs is not None)
    if settings.metrics == "active" and scope == "batch":
        raise ValueError(
            "metrics: expected 'all' for a loss whose gate needs the entropy of every token, "
            "got 'active'"
        )
    chunks, why_two = _chunks(hidden, batch, scope, path)
    costs = None
    if why_two is None:
        some = cost.Rows(
            active=batch.num_tokens,
            chunks=len(chunks),
            forward_only=forward_only,
            sampling_mask=batch.sampling_mask is not None,
        )
        costs = cost.costs_of(hidden, head, path, some)
    schedule, reason = _schedule(settings.schedule, why_two, costs, hidden.device)
    reasons = [*choice.reasons, reason]
    middle = "torch"
    if schedule == "one_pass":
        middle, why = choose_middle(choice.backend.name, scope, batch, config, hidden.dtype)
        reasons.append(why)
    if path.choice.backend.kernels is not None:
        reasons += rows_left_out(settings.metrics, forward_only, middle, hidden)
    dtype = logits_dtype(hidden.dtype, precision)
    tokens = batch.num_tokens
    size = path.tile_rows if choice.backend.kernels is not None else tokens
    highest = max((chunk.stop - chunk.start for chunk in chunks), default=min(size, tokens))
    rows = path.fixed_rows or max(highest, 1)
    return Plan(
        backend=choice.backend.name,
        schedule=schedule,
        scope=scope,
        precision=precision,
        logits_dtype=dtype,
        tile_rows=rows,
        workspace_bytes=rows * columns * dtype.itemsize,
        chunks=tuple(chunks) if schedule == "one_pass" else (),
        middle=middle,
        path=path,
        fingerprint=fingerprint(path, hidden, head, schedule),
        costs=costs,
        reasons=tuple(reasons),
    )


def explain(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    **settings: Any,
) -> Plan:
    """The plan that ``linear_policy_loss`` would follow for the same arguments; print it.

    Its ``fingerprint`` is a line to log with a run: it names the kernels, their configuration, the
    precision, the schedule and the libraries. Where two runs differ in it, so may their bits.

    Args:
        hidden, weight, batch, config, bias, lora, logit_scale, softcap: as for
            ``linear_policy_loss``.
        settings: ``precision``, ``backend``, ``schedule``, ``max_workspace_bytes``,
            ``batch_invariant``, ``metrics``.

    Raises:
        ValueError: as ``linear_policy_loss`` would for these settings.
    """
    chosen = HeadSettings(**settings)
    transform = Transform(logit_scale, softcap, config.temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, chosen.precision, lora)
    active = active_rows(batch, config)
    waiting = active.waiting if chosen.metrics == "all" else 0
    rows = hidden.reshape(-1, hidden.shape[-1])
    return make_plan(rows, head, active.batch, config, chosen, waiting)


def _path(hidden: Tensor, head: Head, batch: TokenBatch, settings: HeadSettings) -> Path:
    return choose_path(
        settings.backend,
        hidden,
        head,
        settings.precision,
        settings.max_workspace_bytes,
        batch_invariant=settings.batch_invariant,
        sampling_mask=batch.sampling_mask is not None,
    )


def _chunks(
    hidden: Tensor, batch: TokenBatch, scope: str, path: Path
) -> tuple[list[slice], str | None]:
    """The row ranges of one_pass, or why it cannot run."""
    if path.choice.backend.kernels is None:
        return [], "the eager reference forms all logits"
    if path.batch_invariant and not path.keeps_bits_in_one_pass(hidden):
        return [], "the forward that fixes a row's bits forms no logits to take gradients from"
    if scope == "batch":
        return [], "a gate of this loss needs the entropy of the whole batch first"
    size = path.tile_rows
    if scope == "token":
        return row_chunks(batch.num_tokens, size), None
    longest = max(batch.lengths, default=0)
    if longest > size:
        return [], f"a sequence of {longest} tokens does not fit into a tile of {size} rows"
    return sequence_chunks(batch.lengths, size), None


def sequence_chunks(lengths: tuple[int, ...], size: int) -> list[slice]:
    """Row ranges of at most ``size`` rows that end where sequences end."""
    chunks, start, stop = [], 0, 0
    for length in lengths:
        if stop + length - start > size:
            chunks.append(slice(start, stop))
            start = stop
        stop += length
    if stop > start:
        chunks.append(slice(start, stop))
    return chunks


def _schedule(
    requested: str, why_two: str | None, costs: cost.Costs | None, device: torch.device
) -> tuple[str, str]:
    if requested == "one_pass" and why_two is not None:
        raise ValueError(f"schedule: 'one_pass' cannot run: {why_two}")
    if requested != "auto":
        return requested, f"{requested}: forced by the argument"
    if why_two is not None:
        return "two_pass", f"two_pass: {why_two}"
    if costs is None:
        return "one_pass", "one_pass: three products instead of four"
    return costs.choose(cost.free_memory(device))
