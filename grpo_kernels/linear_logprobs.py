"""linear_logprobs: log-probabilities of a linear head, without storing its logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import BACKENDS, EXTRAS, OutputSpec, RowStats, requested_backend
from grpo_kernels.batch import SamplingMask, check_sampling_mask
from grpo_kernels.common import check_device
from grpo_kernels.engine import (
    ENTRIES,
    Bounded,
    LogprobsPlan,
    Needs,
    Rows,
    RunOptions,
    Selection,
    check_ranks_agree,
    compiled_stats,
    differentiable_stats,
    raise_on_all_ranks,
    unpack_entries,
)
from grpo_kernels.head import (
    Head,
    HeadLoRA,
    VocabShard,
    check_floating,
    checked_head,
    head_of,
    row_temperature,
    unshard_head,
)

DIFFERENTIABLE = ("logprobs", "entropy", "masked_logprobs")
_TOP_K = ("topk_logprobs", "topk_indices")


class LinearLogprobs(NamedTuple):
    """Outputs of :func:`linear_logprobs`; None unless requested.

    Shaped as ``target``; ``topk_*`` have a last dimension ``top_k``. Only ``logprobs``, ``entropy``
    and ``masked_logprobs`` are differentiable.
    """

    logprobs: Tensor | None = None  # log p[target]
    entropy: Tensor | None = None  # nats
    lse: Tensor | None = None  # logsumexp of the transformed logits
    is_top1: Tensor | None = None  # bool, the target is the first argmax
    sum_sq_probs: Tensor | None = None  # sum_j p_j^2
    max_logit: Tensor | None = None  # largest transformed logit
    min_logit: Tensor | None = None  # smallest
    mean_logit: Tensor | None = None  # mean of the transformed logits
    # log of p[target] / sum of p over the sampling mask and the target
    masked_logprobs: Tensor | None = None
    topk_logprobs: Tensor | None = None  # (..., k) log p of the first k ids, descending
    topk_indices: Tensor | None = None  # (..., k) int64, these ids
    # with a sparse backward, about the gradient of logprobs with respect to the logits:
    entries: Tensor | None = None  # int32, entries kept per row; -1: the row is exact
    gradient_error: Tensor | None = None  # per row: L2 norm of the error / L2 norm of the gradient
    gradient_error_bound: Tensor | None = None  # L1 norm of the error


_ALL_OUTPUTS = LinearLogprobs._fields
# the fields of :class:`RowStats`, in its order, then the outputs of a sparse backward
OUTPUTS = _ALL_OUTPUTS[: len(RowStats._fields)]
BOUNDED = _ALL_OUTPUTS[len(RowStats._fields) :]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_shard: VocabShard | None = None,
    outputs: tuple[str, ...] = ("logprobs",),
    precision: str = "fp32",
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
    sampling_mask: SamplingMask | None = None,
    top_k: int | None = None,
    batch_invariant: bool = False,
    backward: str | Bounded = "exact",
    activation_bytes: int | None = None,
) -> LinearLogprobs:
    """Compute log-probabilities of ``target`` under a linear head, without storing its logits.

    The scores are ``softcap * tanh(logit_scale * logits / softcap) / temperature``, without the
    tanh if ``softcap`` is None. Gradients flow to ``hidden``, ``weight``, ``bias`` and the factors
    of ``lora`` through ``logprobs``, ``entropy`` and ``masked_logprobs``.

    Example:
        >>> hidden = torch.randn(2, 8, 64, requires_grad=True)  # (..., D)
        >>> weight = torch.randn(1000, 64, requires_grad=True)  # (V, D)
        >>> target = torch.randint(1000, (2, 8))
        >>> out = linear_logprobs(hidden, weight, target, outputs=("logprobs", "entropy"))
        >>> out.logprobs.shape
        torch.Size([2, 8])
        >>> out.logprobs.sum().backward()

    Args:
        hidden: (..., D) last hidden states; fp32, bf16, fp16 or fp64.
        weight: (V, D) LM-head weight of the same dtype (any dtype under autocast), or a
            :class:`Head`, which also holds the bias, LoRA, scale, softcap and shard.
        target: (...) int64 ids in [0, V); a row with -100 is skipped and gives 0.
        bias: (V,) or None.
        lora: an adapter of the head, or None. Its update is added to the logits in fp32; no (V, D)
            update is formed.
        temperature: a float > 0, or one value per row, shaped as ``target``; not differentiable.
        logit_scale: factor on the logits (Cohere, Granite).
        softcap: tanh bound on the logits (Gemma), or None.
        vocab_shard: if the vocabulary is split over ranks, the part that ``weight``, ``bias`` and
            ``lora.b`` hold. Call on all ranks of the group with the same ``hidden``, ``target`` and
            options. All ranks get the same outputs, over the whole vocabulary and with its ids,
            and the same gradients of ``hidden`` and ``lora.a``, summed over the ranks. Results are
            rounded as without shards.
        outputs: which of ``logprobs, entropy, lse, is_top1, sum_sq_probs, max_logit, min_logit,
            mean_logit, masked_logprobs, topk_logprobs, topk_indices`` to return. The last four
            need a tile of logits, even on a backend that otherwise stores none. The top k are
            sorted by score, ties by id; a row without a softmax (NaN or +inf among its scores, or
            all scores -inf) has ids -1 and log-probabilities NaN. With a sparse ``backward``, also
            ``entries, gradient_error, gradient_error_bound``: the error of a row's gradient of
            ``hidden`` is at most ``gradient_error_bound``, times the gradient of its
            log-probability, times the largest L2 norm of a row of ``weight``.
        precision: ``"fp32"`` keeps the accumulators of the GEMM unrounded; ``"input"`` rounds
            logits to the input dtype, as inference engines do; ``"tf32"`` multiplies fp32 inputs on
            a GPU's tf32 units. torch's own precision switches have no effect.
        backend: a name from :func:`available_backends`, or ``"auto"``.
        max_workspace_bytes: maximum size of the logits tile; None: the backend's default.
        sampling_mask: the ids that sampling left for each row of ``target.reshape(-1)``, for
            ``masked_logprobs``: the log-probability that a top-p, top-k or min-p sampler gave the
            target.
        top_k: how many ids ``topk_logprobs`` and ``topk_indices`` hold, in [1, V].
        batch_invariant: make a row's bits depend only on its own inputs, not on other rows, their
            number, or whether gradients are computed. Guaranteed per device, arguments and (CPU)
            thread count; :func:`grpo_kernels.explain_logprobs` gives a fingerprint of everything
            that matters. Otherwise fp32 rounding may differ.
        backward: ``"exact"``; ``"sparse"``: gradients from the large entries of the softmax and an
            unbiased sample of the small ones, within a tolerance; or a :class:`Bounded` with its
            settings. Not for ``masked_logprobs``. A gradient through ``entropy`` is exact.
        activation_bytes: how much the forward may keep so that the backward computes no logits:
            (T, D) values if the head has no gradient, else (T, V) in the dtype of the hidden
            states. None: only the (T, D) values, as large as the hidden states (twice in fp16). 0:
            nothing. A gradient through ``entropy`` or ``masked_logprobs`` always computes the
            logits again.

    Returns:
        :class:`LinearLogprobs`, with statistics in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
        RuntimeError: ``batch_invariant`` does not hold for the library's GEMM.
    """
    check_floating("hidden", hidden)
    with raise_on_all_ranks(vocab_shard, hidden.device):
        _check_outputs(outputs, sampling_mask, top_k)
        options = RunOptions(
            precision=precision,
            backend=backend,
            max_workspace_bytes=max_workspace_bytes,
            batch_invariant=batch_invariant,
            backward=backward,
            activation_bytes=activation_bytes,
        )
        _check_target(hidden, target)
        temperature = row_temperature(temperature, target.shape, hidden)
        head = head_of(
            weight=weight,
            bias=bias,
            lora=lora,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            shard=vocab_shard,
        )
        head = unshard_head(head)
        hidden, head = checked_head(hidden, head, precision)
        if sampling_mask is not None:
            check_sampling_mask(sampling_mask, target)
        if "masked_logprobs" in outputs and options.bounded is not None:
            raise ValueError(f"backward: expected 'exact' for masked_logprobs, got {backward!r}")
        if top_k is not None and not 1 <= top_k <= head.vocab_size:
            raise ValueError(f"top_k: expected 1 to {head.vocab_size} (V), got {top_k}")
        rows = Rows(
            hidden=hidden.reshape(-1, hidden.shape[-1]),
            head=head,
            target=target.reshape(-1),
            sampling_mask=sampling_mask if "masked_logprobs" in outputs else None,
        )
        spec = OutputSpec(
            extras=any(name in EXTRAS for name in outputs),
            mean="mean_logit" in outputs,
            top_k=top_k or 0,
        )
        compiling = torch.compiler.is_compiling() and _forms_tiles(backend)
        if not compiling:
            selection = rows.with_target()
            valid = rows.selected(selection)
            plan = LogprobsPlan.of(
                dtype=hidden.dtype,
                head=head,
                tokens=valid.count,
                options=options,
                needs=Needs.of(valid.inputs),
                outputs=spec,
                masked=rows.sampling_mask is not None,
            )
    if compiling:
        stats, saved = compiled_stats(rows, options, spec)
    else:
        stats, saved = _eager_stats(valid, selection, plan)
    values = stats._replace(lse=stats.lse.to(stats.logprobs.dtype))._asdict()
    if any(name in BOUNDED for name in outputs):
        values |= _bounded_outputs(saved, options, head.shard)
    return LinearLogprobs(**{name: _output(name, values[name], target) for name in outputs})


def _forms_tiles(backend: str) -> bool:
    """Return whether torch.compile sees a custom op; it traces the eager reference instead."""
    forced = BACKENDS.get(requested_backend(backend))
    return forced is None or forced.has_tiles


def _eager_stats(
    rows: Rows, selection: Selection, plan: LogprobsPlan
) -> tuple[RowStats, Tensor | None]:
    """Compute the selected ``rows``, and scatter their statistics to all rows of the call."""
    check_ranks_agree(rows.target, rows.head, plan.route, (plan.outputs, plan.saved.kind))
    stats, saved = differentiable_stats(rows, plan)
    whole = (None if x is None else selection.scatter(x) for x in stats)
    if saved is not None and plan.saved.kind == ENTRIES:
        saved = selection.scatter(saved)
    return RowStats(*whole), saved  # type: ignore[arg-type]


def explain_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_shard: VocabShard | None = None,
    sampling_mask: bool = False,
    tiled: bool = False,
    **options: Any,
) -> LogprobsPlan:
    """Return the plan of a :func:`linear_logprobs` call with these arguments, without running it.

    Args:
        sampling_mask: whether ``masked_logprobs`` are requested.
        tiled: whether ``mean_logit``, ``topk_logprobs`` or ``topk_indices`` are requested.
        options: ``precision``, ``backend``, ``max_workspace_bytes``, ``batch_invariant``,
            ``backward``, ``activation_bytes``.

    Returns:
        The :class:`LogprobsPlan`. Print it to see what runs and why. Its ``fingerprint`` names the
        kernels, their configuration, the precision and the libraries, and ends with a hash of
        these. With ``batch_invariant``, two runs with the same fingerprint give a row the same
        bits; a new driver, library or device changes it.

    Raises:
        ValueError: as ``linear_logprobs`` would for these arguments.
    """
    chosen = RunOptions(**options)
    head = head_of(
        weight=weight,
        bias=bias,
        lora=lora,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=1.0,
        shard=vocab_shard,
    )
    hidden, head = checked_head(hidden, head, chosen.precision)
    return LogprobsPlan.of(
        dtype=hidden.dtype,
        head=head,
        tokens=hidden.numel() // hidden.shape[-1],
        options=chosen,
        needs=Needs.of((hidden, *head.tensors)),
        outputs=OutputSpec(mean=tiled),
        masked=sampling_mask,
    )


def _bounded_outputs(
    saved: Tensor | None, options: RunOptions, shard: VocabShard | None
) -> dict[str, Tensor]:
    """Return the outputs of a sparse backward, which :data:`BOUNDED` names."""
    if saved is None or options.bounded is None or saved.dim() < 2:
        raise ValueError(
            f"outputs: expected {', '.join(BOUNDED)} only with backward=Bounded(...) and an input "
            f"that requires a gradient, got backward={options.backward!r}"
        )
    entries = unpack_entries(saved.detach())
    used = entries.used
    exact = entries.used < 0
    if shard is not None:
        used = torch.where(exact, used, shard.gather(used).sum(0, dtype=used.dtype))
    # a row without a target has no gradient, so no error either
    error = torch.where(exact | (entries.error == 0), 0.0, entries.error / entries.norm)
    return {
        "entries": used,
        "gradient_error": error,
        "gradient_error_bound": torch.where(exact, 0.0, entries.error_l1),
    }


def _output(name: str, value: Tensor | None, target: Tensor) -> Tensor:
    assert value is not None  # it was requested
    if name not in DIFFERENTIABLE:
        value = value.detach()
    return value.reshape((*target.shape, *value.shape[1:]))


def _check_outputs(
    outputs: tuple[str, ...], sampling_mask: SamplingMask | None, top_k: int | None
) -> None:
    names = outputs if isinstance(outputs, tuple | list) else ()
    if not names or any(name not in _ALL_OUTPUTS for name in names):
        raise ValueError(
            f"outputs: expected a tuple of names among {', '.join(_ALL_OUTPUTS)}; got {outputs!r}"
        )
    if "masked_logprobs" in outputs and sampling_mask is None:
        raise ValueError(
            "sampling_mask: expected a SamplingMask for the output 'masked_logprobs', got None"
        )
    of_top_k = [name for name in _TOP_K if name in outputs]
    if bool(of_top_k) != (top_k is not None):
        expected = f"a number of ids for the output {of_top_k[0]!r}" if of_top_k else "None"
        without = "" if of_top_k else f" without one of the outputs {', '.join(_TOP_K)}"
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
    check_device("target", target, hidden.device)
