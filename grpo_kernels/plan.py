"""Which schedule runs a loss, and why: decided before any work, printed by ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.logprob.check import prepare_head
from grpo_kernels.logprob.fingerprint import fingerprint
from grpo_kernels.logprob.head import Head, logits_dtype
from grpo_kernels.logprob.path import Path, choose_path
from grpo_kernels.logprob.rows import Transform
from grpo_kernels.logprob.schedule import row_chunks
from grpo_kernels.losses import LossConfig
from grpo_kernels.middle import choose_middle

SCHEDULES = ("auto", "one_pass", "two_pass")


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """How the head's products are computed; exactness depends on ``precision`` alone."""

    precision: str = "fp32"
    backend: str = "auto"
    schedule: str = "auto"
    max_workspace_bytes: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
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
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"backend   {self.backend}",
            f"schedule  {self.schedule} (scope of the loss: {self.scope})",
            f"logits    {self.logits_dtype}, precision={self.precision!r}",
            f"tile      {self.tile_rows} rows, {self.workspace_bytes / 2**20:.1f} MiB",
            f"numerics  {self.fingerprint}",
        ]
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons)])


def make_plan(
    hidden: Tensor,  # (T, D)
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    settings: HeadSettings,
) -> Plan:
    """Chooses backend, schedule and chunks for the rows of ``batch``."""
    columns, precision = head.weight.shape[0], settings.precision
    path = choose_path(
        settings.backend,
        hidden,
        head,
        precision,
        settings.max_workspace_bytes,
        batch_invariant=settings.batch_invariant,
        kept=batch.kept is not None,
    )
    choice, size = path.choice, path.tile_rows
    scope = config.scope(batch.rollout_logprobs is not None)
    why_two: str | None = None
    chunks: list[slice] = []
    if choice.backend.kernels is None:
        why_two = "the eager reference forms all logits"
        size = max(batch.num_tokens, 1)
    elif settings.batch_invariant and not path.keeps_bits_in_one_pass(hidden):
        why_two = "the forward that fixes a row's bits forms no logits to take gradients from"
    elif scope == "batch":
        why_two = "a gate of this loss needs the entropy of the whole batch first"
    else:
        chunks, why_two = _chunks(batch, scope, size)
    schedule, reason = _schedule(settings.schedule, why_two)
    reasons = [*choice.reasons, reason]
    middle = "torch"
    if schedule == "one_pass":
        middle, why = choose_middle(choice.backend.name, scope, batch, config, hidden.dtype)
        reasons.append(why)
    dtype = logits_dtype(hidden.dtype, precision)
    rows = path.fixed_rows or min(size, max(batch.num_tokens, 1))
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
        reasons=tuple(reasons),
    )


def explain(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    **settings: Any,
) -> Plan:
    """The plan that ``linear_policy_loss`` would follow for the same arguments; print it.

    It is for all tokens of ``batch``: rows of zero advantage, which may need no gradient, are set
    aside when the loss runs.

    Its ``fingerprint`` is a line to log with a run: it names the kernels, their configuration, the
    precision, the schedule and the libraries. Where two runs differ in it, so may their bits.

    Args:
        hidden, weight, batch, config, bias, logit_scale, softcap: as for ``linear_policy_loss``.
        settings: ``precision``, ``backend``, ``schedule``, ``max_workspace_bytes``,
            ``batch_invariant``.

    Raises:
        ValueError: as ``linear_policy_loss`` would for these settings.
    """
    chosen = HeadSettings(**settings)
    transform = Transform(float(logit_scale), softcap, config.temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, chosen.precision)
    return make_plan(hidden.reshape(-1, hidden.shape[-1]), head, batch, config, chosen)


def _chunks(batch: TokenBatch, scope: str, size: int) -> tuple[list[slice], str | None]:
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


def _schedule(requested: str, why_two: str | None) -> tuple[str, str]:
    if requested == "one_pass" and why_two is not None:
        raise ValueError(f"schedule: 'one_pass' cannot run: {why_two}")
    if requested != "auto":
        return requested, f"{requested}: forced by the argument"
    if why_two is not None:
        return "two_pass", f"two_pass: {why_two}"
    return (
        "one_pass",
        "one_pass: the loss is settled inside a chunk, three products instead of four",
    )
