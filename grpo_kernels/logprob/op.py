"""linear_logprobs: log-probabilities of a linear head, without its logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.kept import KeptSet, check_kept
from grpo_kernels.logprob.check import (
    check_device,
    check_floating,
    check_kept_range,
    prepare_head,
    row_temperature,
)
from grpo_kernels.logprob.head import Head
from grpo_kernels.logprob.library import HeadOptions, Tensors, linear_logprobs_forward
from grpo_kernels.logprob.path import choose_path
from grpo_kernels.logprob.reference import reference_logprobs
from grpo_kernels.logprob.rows import EXTRAS, RowStats, Transform
from grpo_kernels.logprob.valid_rows import Rows

# in the order of RowStats
OUTPUTS = (
    "logprobs",
    "entropy",
    "lse",
    *EXTRAS,
    "kept_logprobs",
)
DIFFERENTIABLE = ("logprobs", "entropy", "kept_logprobs")


class LinearLogprobs(NamedTuple):
    """Outputs of :func:`linear_logprobs`, each of the shape of ``target``; None if not asked."""

    logprobs: Tensor | None  # log p[target]
    entropy: Tensor | None  # nats
    lse: Tensor | None  # logsumexp of the transformed logits; no gradient
    is_top1: Tensor | None  # bool, the target is the first argmax
    sum_sq_probs: Tensor | None  # sum_j p_j^2; no gradient
    max_logit: Tensor | None  # largest transformed logit; no gradient
    min_logit: Tensor | None  # smallest; no gradient
    kept_logprobs: Tensor | None  # log of p[target] / sum of p over the kept set and the target


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: tuple[str, ...] = ("logprobs",),
    precision: str = "fp32",
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
    kept: KeptSet | None = None,
    batch_invariant: bool = False,
) -> LinearLogprobs:
    """Log-probabilities of ``target`` under a linear head; the logits never exist as a whole.

    The scores are ``softcap * tanh(logit_scale * logits / softcap) / temperature``, without the
    tanh when ``softcap`` is None. Gradients flow to hidden, weight and bias, through ``logprobs``,
    ``entropy`` and ``kept_logprobs``.

    Args:
        hidden: (..., D) last hidden states; fp32, bf16, fp16 or fp64.
        weight: (V, D) LM-head weight of the same dtype (under autocast any).
        target: (...) int64 ids in [0, V); -100 marks a row that costs nothing and gives 0.
        bias: (V,) or None.
        temperature: a float > 0, or one value per row, shaped as ``target``; no gradient.
        logit_scale: a factor on the logits (Cohere, Granite).
        softcap: bound of the logits (Gemma), or None.
        outputs: which of ``logprobs, entropy, lse, is_top1, sum_sq_probs, max_logit, min_logit,
            kept_logprobs`` to return.
        precision: ``"fp32"`` keeps the accumulators of the product unrounded; ``"input"`` rounds
            logits to the input dtype, as inference engines do; ``"tf32"`` multiplies fp32 inputs on
            a GPU's tf32 units. torch's own precision switches have no say in it.
        backend: a name of :func:`available_backends`, or ``"auto"``.
        max_workspace_bytes: bound on the logits tile; None: the backend's default.
        kept: the ids that sampling left for each row of ``target.reshape(-1)``, for
            ``kept_logprobs``: the log-probability that a top-p, top-k or min-p sampler gave the
            target. Its scores are read from a tile of logits, also where a backend needs none.
        batch_invariant: a row's bits depend on its own inputs alone: not on the rows around it, on
            their number, or on whether gradients are wanted. Else they may, by fp32 rounding. It
            holds for one device, one setting of the arguments and, on a CPU, of its threads:
            :func:`grpo_kernels.explain_logprobs` gives a fingerprint of all that matters.

    Returns:
        :class:`LinearLogprobs`, statistics in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
    """
    _check_outputs(outputs, kept)
    check_floating("hidden", hidden)
    _check_target(hidden, target)
    temperature = row_temperature(temperature, target.shape, hidden)
    transform = Transform(float(logit_scale), softcap, temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, precision)
    if kept is not None:
        check_kept(kept, target)
        check_kept_range(kept.max_id, weight.shape[0])
        kept = kept if "kept_logprobs" in outputs else None
    rows = hidden.reshape(-1, hidden.shape[-1])
    path = choose_path(
        backend,
        rows,
        head,
        precision,
        max_workspace_bytes,
        batch_invariant=batch_invariant,
        kept=kept is not None,
    )
    if path.choice.backend.kernels is None:
        stats = _reference(rows, head, target.reshape(-1), precision, kept)
    else:
        tensors = Tensors.of(rows, head, target.reshape(-1), kept)
        extras = any(name in EXTRAS for name in outputs)
        options = HeadOptions.of(transform, path)
        stats = RowStats(*linear_logprobs_forward(*tensors, *options, extras))
    stats = stats._replace(lse=stats.lse.to(stats.logp.dtype))
    values = zip(OUTPUTS, stats, strict=True)
    return LinearLogprobs(
        *(_output(name, value, target) if name in outputs else None for name, value in values)
    )


def _output(name: str, value: Tensor | None, target: Tensor) -> Tensor:
    assert value is not None  # it was asked for
    if name not in DIFFERENTIABLE:
        value = value.detach()
    return value.reshape(target.shape)


def _check_outputs(outputs: tuple[str, ...], kept: KeptSet | None) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if isinstance(outputs, str) or unknown or not outputs:
        raise ValueError(
            f"outputs: expected a tuple of names among {', '.join(OUTPUTS)}; got {outputs!r}"
        )
    if "kept_logprobs" in outputs and kept is None:
        raise ValueError("kept: expected a KeptSet for the output 'kept_logprobs', got None")


def _check_target(hidden: Tensor, target: Tensor) -> None:
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target: expected a torch.int64 tensor, got {got}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target: expected shape {tuple(hidden.shape[:-1])} (of hidden without its last "
            f"dimension), got {tuple(target.shape)}"
        )
    check_device("target", target, hidden)


def _reference(
    hidden: Tensor, head: Head, target: Tensor, precision: str, kept: KeptSet | None
) -> RowStats:
    rows = Rows(hidden=hidden, head=head, target=target, kept=kept).valid()
    stats = reference_logprobs(rows.hidden, rows.head, rows.target, precision, rows.kept)
    return RowStats(*(rows.spread(x) if x is not None else None for x in stats))  # type: ignore[arg-type]
