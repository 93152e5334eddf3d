"""The text of a loss's plan: what runs, and why. The plan imports it to print itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_kernels.batch import host
from grpo_kernels.engine import backend_reasons, saved_words, sparse_words
from grpo_kernels.schedule.chunk_loss import TORCH_OPS, why_not_generated


def loss_lines(plan: Any) -> list[str]:
    """Return the table of a ``linear_policy_loss`` call."""
    tile = f"{'exponentials of ' * plan.route.exponentials}{plan.tile_rows} rows"
    return [
        f"backend   {plan.backend}",
        f"schedule  {plan.schedule} (scope of the loss: {plan.scope})",
        f"logits    {plan.route.logits}, precision={plan.precision!r}",
        f"tile      {tile}, {plan.workspace_bytes / 2**20:.1f} MiB",
        f"numerics  {plan.fingerprint}",
    ]


def loss_reasons(plan: Any) -> list[str]:
    """Say why a ``linear_policy_loss`` call runs as planned, a sentence each."""
    has_tiles = plan.route.backend.has_tiles
    bounded = plan.options.bounded
    reasons = backend_reasons(plan.route)
    reasons.append(f"{plan.schedule}: {_why_schedule(plan)}")
    other = _other_schedule(plan)
    if other is not None:
        reasons.append(other)
    if has_tiles:
        reasons.append(f"loss: {_why_method(plan)}")
    if plan.needs.any and bounded is not None:
        reasons.append(sparse_words(plan.needs, plan.needs_of_gemms, bounded))
    if plan.needs.any and (plan.schedule == "two_pass" or bounded is not None):
        reasons.append(saved_words(plan.saved))
    if has_tiles:
        reasons += _rows_left_out(plan)
    return reasons


def _why_schedule(plan: Any) -> str:
    if plan.options.schedule != "auto":
        return "forced by the argument"
    if plan.why_two_passes is not None:
        return plan.why_two_passes
    if plan.options.bounded is not None:
        return "entries are chosen while a chunk's logits are in memory"
    if plan.keeps:
        return "three GEMMs; the backward computes the gradients from stored exponentials"
    if plan.schedule == "one_pass":
        return "three GEMMs instead of four"
    return "one_pass would accumulate an fp32 (V, D) gradient after every chunk, which is slower"


def _other_schedule(plan: Any) -> str | None:
    """Say in a line what the other schedule gains and costs, if it can run."""
    can_choose = plan.needs.weight and plan.options.bounded is None and not plan.is_smaller
    if not can_choose or (plan.schedule == "two_pass" and plan.why_two_passes is not None):
        return None
    name = "two_pass" if plan.schedule == "one_pass" else "one_pass"
    other = plan.with_options(replace(plan.options, schedule=name))
    if other is None or not plan.route.backend.has_tiles:
        return None
    mine, its = (each.extra_bytes / 2**20 for each in (plan, other))
    gemms = "more" if name == "two_pass" else "less"
    size = f"about {its:,.1f} MiB next to the gradients, not {mine:,.1f}"
    return f"{name} instead: {size}, and one GEMM {gemms}"


def _why_method(plan: Any) -> str:
    why_not = None
    if plan.route.backend.generates and plan.method == TORCH_OPS:
        why_not = why_not_generated(plan.batch, plan.config)
    words = plan.method + (f", because {why_not}" if why_not else "")
    if plan.route.exponentials:
        return words + "; the GEMM of the logits stores exponentials instead of logits"
    return words + ("; logits are read once" if plan.with_gradient else "")


def _rows_left_out(plan: Any) -> list[str]:
    """Say what happens to the rows that get no gradient."""
    known = "rows of zero advantage: not computed"
    if plan.options.metric_rows == "all":
        waiting = plan.batch.num_tokens - plan.active.batch.num_tokens
        known = f"rows of zero advantage: {waiting} run only the forward, for the metrics"
    if plan.needs.any and not plan.needs_of_gemms.any:
        gated = "no entries"
    elif plan.leaves_out:
        gated = "left out of the GEMMs of their gradients, if they are at least a sixteenth"
    elif plan.with_gradient:
        gated = "zeros in the GEMMs, because their logits are already overwritten by gradients"
    elif host.reading_is_free(plan.head.weight):
        gated = "left out of the GEMMs of their gradients"
    else:
        gated = "zeros in the GEMMs: otherwise the host would have to wait for the device"
    return [known, f"rows that the loss clips or gates: {gated}"]
