"""The text of plans: what runs and why, and a fingerprint of everything that the bits depend on.

Plans import this module to print themselves, so it cannot name their types.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from grpo_kernels.backends import device_numerics, why_backend
from grpo_kernels.common import VERSION
from grpo_kernels.engine.options import Bounded
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Needs
from grpo_kernels.head import Head

_NAMES = ("hidden", "weight", "bias", "lora_a", "lora_b")  # fields of :class:`Needs`


def forward_words(route: Route) -> str:
    """Say how the statistics are computed."""
    if not route.backend.has_tiles:
        return "full logits"
    if route.exponentials:
        return "exponentials of logits"
    if not route.has_tile:
        return "linear_stats"
    words = f"logits tile of {route.tile_rows} rows"
    if route.fixed_rows is None:
        return words
    checked = "" if route.forms_logits else "; GEMM checked for row invariance on first use"
    return f"{words}, zero-padded{checked}"


def backend_reasons(route: Route) -> list[str]:
    """Say why this backend runs, a sentence each."""
    return why_backend(route.backend, route.options.backend, route.device, route.dtype)


def fingerprint(route: Route, head: Head, schedule: str | None = None) -> str:
    """Return a line that names everything that the bits depend on, except the inputs.

    Two runs with the same line compute their statistics with the same kernels, tiles, precision and
    libraries. The number of rows is not part of it: it matters only without ``batch_invariant``, by
    fp32 rounding. The line ends with a hash of the rest.
    """
    backend = route.backend
    dtype = route.dtype
    options = route.options
    tiled = route.has_tile and not route.exponentials
    numerics = backend.numerics(dtype, head, route.precision, tiled)
    parts = [
        f"grpo-kernels {VERSION}",
        " ".join([backend.name, *numerics]),
        forward_words(route),
        None if head.lora is None else f"LoRA of rank {head.lora.rank}",
        f"{str(dtype).removeprefix('torch.')} precision={route.precision}",
        schedule,
        None if head.shard is None else f"vocabulary over {head.shard.size} ranks",
        "batch_invariant" if options.batch_invariant else None,
        None if options.bounded is None else str(options.bounded),
        " ".join([device_numerics(route.device), *_libraries(route, head)]),
    ]
    line = " | ".join(part for part in parts if part is not None)
    return f"{line} | {hashlib.sha256(line.encode()).hexdigest()[:8]}"


def _libraries(route: Route, head: Head) -> list[str]:
    """Return the versions of the GEMM libraries, and the number of CPU threads."""
    libraries = [f"torch={torch.__version__}"]
    if route.device.type == "cuda":
        library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[-1]
        libraries.append(f"blas={library} {torch.version.cuda or torch.version.hip}")
    elif route.device.type == "cpu" and (route.has_tile or head.lora is not None):
        libraries.insert(0, f"threads={torch.get_num_threads()}")
    return libraries


def saved_words(saved: Any) -> str:
    """Say what the forward saves for the backward, and why."""
    words = "logits are computed again"
    if saved.saves:
        words = f"keeps {saved.kind}, {saved.nbytes / 2**20:.1f} MiB"
    why = saved.why
    if saved.too_large is not None:
        other = saved.too_large
        why = f"activation_bytes={other.nbytes} would keep {other.kind}"
    gemms = f"{saved.gemms} GEMM{'s' if saved.gemms > 1 else ''} in total"
    return f"backward: {words}, {gemms}" + (f": {why}" if why else "")


def sparse_words(needs: Needs, exact: Needs, bounded: Bounded) -> str:
    """Say which gradients of a sparse backward are sparse, and how large their error may be."""
    sparse = [name for name in _NAMES if getattr(needs, name) and not getattr(exact, name)]
    words = f"sparse and unbiased: the gradients of {', '.join(sparse) or 'nothing'}"
    if exact.any:
        words += f"; exact: {', '.join(n for n in _NAMES if getattr(exact, n))}"
    error = f"at most {100 * bounded.tolerance:g} % of the gradient of the logits"
    return f"{words}. Expected error: {error}, in the norm over all rows"


def logprobs_reasons(plan: Any) -> list[str]:
    """Say why a ``linear_logprobs`` call runs as planned, a sentence each."""
    reasons = backend_reasons(plan.route)
    if plan.outputs.tiled or plan.masked:
        reasons.append("a tile of logits: some of the requested outputs need it")
    if plan.options.bounded is not None and plan.needs.any:
        reasons.append(sparse_words(plan.needs, plan.needs_of_gemms, plan.options.bounded))
    return [*reasons, saved_words(plan.saved)]


def logprobs_lines(plan: Any) -> list[str]:
    """Return the table of a ``linear_logprobs`` call."""
    return [
        f"backend   {plan.backend}",
        f"forward   {forward_words(plan.forward_route)}, precision={plan.precision!r}",
        f"numerics  {plan.fingerprint}",
    ]


def divergence_lines(plan: Any) -> list[str]:
    """Return the table of a ``linear_divergence`` call."""
    passes = f"{plan.gemms} GEMMs in one pass, {forward_words(plan.route)}"
    teacher = "none" if plan.teacher is None else f"1, {forward_words(plan.teacher)}"
    return [
        f"backend   {plan.backend}",
        f"student   {passes}, precision={plan.precision!r}",
        f"teacher   {teacher}",
        f"numerics  {plan.fingerprint}",
    ]
