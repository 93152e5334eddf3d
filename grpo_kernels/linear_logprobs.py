"""linear_logprobs: log-probabilities of a linear head, without its logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.base import EXTRAS, RowStats, Transform
from grpo_kernels.backends.reference import reference_logprobs
from grpo_kernels.backends.registry import REFERENCE, requested_backend
from grpo_kernels.batch.sampling_mask import SamplingMask, check_sampling_mask
from grpo_kernels.engine.ops import HeadOptions, Tensors, linear_logprobs_forward
from grpo_kernels.engine.topk import UNRANKED, Ranking
from grpo_kernels.head.checks import (
    check_device,
    check_floating,
    check_mask_range,
    check_row_temperature,
    check_workspace,
    prepare_head,
    row_temperature,
)
from grpo_kernels.head.derivatives import check_plain
from grpo_kernels.head.lora import HeadLoRA

# in the order of RowStats
OUTPUTS = (
    "logprobs",
    "entropy",
    "lse",
    *EXTRAS,
    "masked_logprobs",
    "rank",
    "topk_logprobs",
    "topk_indices",
)
_TOP_K = ("topk_logprobs", "topk_indices")
DIFFERENTIABLE = ("logprobs", "entropy", "masked_logprobs")


class LinearLogprobs(NamedTuple):
    """Outputs of :func:`linear_logprobs`; None if not asked. All have the shape of ``target``, the
    last two one more dimension of ``top_k``."""

    logprobs: Tensor | None  # log p[target]
    entropy: Tensor | None  # nats
    lse: Tensor | None  # logsumexp of the transformed logits; no gradient
    is_top1: Tensor | None  # bool, the target is the first argmax
    sum_sq_probs: Tensor | None  # sum_j p_j^2; no gradient
    max_logit: Tensor | None  # largest transformed logit; no gradient
    min_logit: Tensor | None  # smallest; no gradient
    masked_logprobs: (
        Tensor | None
    )  # log of p[target] / sum of p over the sampling mask and the target
    rank: Tensor | None  # int64, how many ids come before the target; 0: it is top-1
    topk_logprobs: Tensor | None  # (..., k) log p of the first k ids, descending; no gradient
    topk_indices: Tensor | None  # (..., k) int64, these ids


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: tuple[str, ...] = ("logprobs",),
    precision: str = "fp32",
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
    sampling_mask: SamplingMask | None = None,
    top_k: int | None = None,
    batch_invariant: bool = False,
) -> LinearLogprobs:
    """Log-probabilities of ``target`` under a linear head; the logits never exist as a whole.

    The scores are ``softcap * tanh(logit_scale * logits / softcap) / temperature``, without the
    tanh when ``softcap`` is None. Gradients flow to hidden, weight, bias and the factors of
    ``lora``, through ``logprobs``, ``entropy`` and ``masked_logprobs``.

    ``rank`` and the top k order a row's ids by score, equal scores by the smaller id. A row without
    a softmax, with a NaN or +inf among its scores or -inf alone, has rank and ids -1 and
    log-probabilities NaN.

    Args:
        hidden: (..., D) last hidden states; fp32, bf16, fp16 or fp64.
        weight: (V, D) LM-head weight of the same dtype (under autocast any).
        target: (...) int64 ids in [0, V); -100 marks a row that costs nothing and gives 0.
        bias: (V,) or None.
        lora: an adapter of the head, or None. Its update is added to the logits in fp32; no (V, D)
            tensor is made of it.
        temperature: a float > 0, or one value per row, shaped as ``target``; no gradient.
        logit_scale: a factor on the logits (Cohere, Granite).
        softcap: bound of the logits (Gemma), or None.
        outputs: which of ``logprobs, entropy, lse, is_top1, sum_sq_probs, max_logit, min_logit,
            masked_logprobs, rank, topk_logprobs, topk_indices`` to return. The last four are read
            from a tile of logits, also where a backend otherwise forms none.
        precision: ``"fp32"`` keeps the accumulators of the product unrounded; ``"input"`` rounds
            logits to the input dtype, as inference engines do; ``"tf32"`` multiplies fp32 inputs on
            a GPU's tf32 units. torch's own precision switches have no say in it.
        backend: a name of :func:`available_backends`, or ``"auto"``.
        max_workspace_bytes: bound on the logits tile; None: the backend's default.
        sampling_mask: the ids that sampling left for each row of ``target.reshape(-1)``, for
            ``masked_logprobs``: the log-probability that a top-p, top-k or min-p sampler gave the
            target.
        top_k: how many ids ``topk_logprobs`` and ``topk_indices`` hold, in [1, V].
        batch_invariant: a row's bits depend on its own inputs alone: not on the rows around it, on
            their number, or on whether gradients are wanted. Else they may, by fp32 rounding. It
            holds for one device, one setting of the arguments and, on a CPU, of its threads:
            :func:`grpo_kernels.explain_logprobs` gives a fingerprint of all that matters.

    Returns:
        :class:`LinearLogprobs`, statistics in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
    """
    _check_outputs(outputs, sampling_mask, top_k)
    check_workspace(max_workspace_bytes)
    check_floating("hidden", hidden)
    _check_target(hidden, target)
    temperature = row_temperature(temperature, target.shape, hidden)
    transform = Transform(logit_scale, softcap, temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, precision, lora)
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, target)
        check_mask_range(sampling_mask.max_id, weight.shape[0])
        sampling_mask = sampling_mask if "masked_logprobs" in outputs else None
    if top_k is not None and not 1 <= top_k <= weight.shape[0]:
        raise ValueError(f"top_k: expected 1 to {weight.shape[0]} (ids of weight), got {top_k}")
    ranking = Ranking("rank" in outputs, top_k or 0)
    rows = hidden.reshape(-1, hidden.shape[-1])
    scalar = 1.0 if isinstance(temperature, Tensor) else temperature
    options = HeadOptions(
        scalar, transform.logit_scale, softcap, precision, requested_backend(backend),
        max_workspace_bytes, batch_invariant, all_valid=False,
        lora_scaling=1.0 if lora is None else float(lora.scaling),
    )  # fmt: skip
    extras = any(name in EXTRAS for name in outputs)
    stats = head_stats(
        Tensors.of(rows, head, target.reshape(-1), sampling_mask), options, extras, ranking
    )
    stats = stats._replace(lse=stats.lse.to(stats.logp.dtype))
    values = zip(OUTPUTS, stats, strict=True)
    return LinearLogprobs(
        *(_output(name, value, target) if name in outputs else None for name, value in values)
    )


def head_stats(
    tensors: Tensors, options: HeadOptions, extras: bool = False, ranking: Ranking = UNRANKED
) -> RowStats:
    """The statistics behind :func:`linear_logprobs`, of arguments that were checked."""
    if options.backend != REFERENCE:
        factors = {"lora.a": tensors.lora_a, "lora.b": tensors.lora_b}
        check_plain(hidden=tensors.hidden, weight=tensors.weight, bias=tensors.bias, **factors)
        return RowStats(*linear_logprobs_forward(*tensors, *options, extras, *ranking))
    options.path(tensors, ranking)  # for its checks
    check_row_temperature(tensors.row_temperature)
    rows = options.rows(tensors)
    stats = reference_logprobs(
        rows.hidden, rows.head, rows.target, options.precision, rows.sampling_mask, ranking
    )
    return RowStats(*(rows.spread(x) if x is not None else None for x in stats))  # type: ignore[arg-type]


def _output(name: str, value: Tensor | None, target: Tensor) -> Tensor:
    assert value is not None  # it was asked for
    if name not in DIFFERENTIABLE:
        value = value.detach()
    return value.reshape((*target.shape, *value.shape[1:]))


def _check_outputs(
    outputs: tuple[str, ...], sampling_mask: SamplingMask | None, top_k: int | None
) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if isinstance(outputs, str) or unknown or not outputs:
        raise ValueError(
            f"outputs: expected a tuple of names among {', '.join(OUTPUTS)}; got {outputs!r}"
        )
    if "masked_logprobs" in outputs and sampling_mask is None:
        raise ValueError(
            "sampling_mask: expected a SamplingMask for the output 'masked_logprobs', got None"
        )
    wanted = [name for name in _TOP_K if name in outputs]
    if bool(wanted) != (top_k is not None):
        expected = f"a number of ids for the output {wanted[0]!r}" if wanted else "None"
        without = "" if wanted else f" without one of the outputs {', '.join(_TOP_K)}"
        raise ValueError(f"top_k: expected {expected}{without}, got {top_k!r}")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool)):
        raise ValueError(f"top_k: expected an int, got {top_k!r}")


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
