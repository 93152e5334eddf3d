"""linear_logprobs: schema, fake, autograd and the public function around the one loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.logprob.check import (
    check_device,
    check_floating,
    check_target_range,
    prepare_head,
    row_temperature,
)
from grpo_kernels.logprob.dispatch import choose_backend, chunk_rows
from grpo_kernels.logprob.head import Head
from grpo_kernels.logprob.reference import reference_logprobs
from grpo_kernels.logprob.rows import RowStats, Transform, stats_dtype
from grpo_kernels.logprob.schedule import (
    Execution,
    Needs,
    forward,
    forward_backward,
    fp16_gradient_scale,
    row_chunks,
)
from grpo_kernels.packing import IGNORE_INDEX

OUTPUTS = ("logprobs", "entropy", "lse", "is_top1", "sum_sq_probs")  # in the order of RowStats
DIFFERENTIABLE = ("logprobs", "entropy")


class LinearLogprobs(NamedTuple):
    """Outputs of :func:`linear_logprobs`, each of the shape of ``target``; None if not asked."""

    logprobs: Tensor | None  # log p[target]
    entropy: Tensor | None  # nats
    lse: Tensor | None  # logsumexp of the transformed logits; no gradient
    is_top1: Tensor | None  # bool, the target is the first argmax
    sum_sq_probs: Tensor | None  # sum_j p_j^2; no gradient


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
) -> LinearLogprobs:
    """Log-probabilities of ``target`` under a linear head; the logits never exist as a whole.

    The scores are ``softcap * tanh(logit_scale * logits / softcap) / temperature``, without the
    tanh when ``softcap`` is None. Gradients flow to hidden, weight and bias, through ``logprobs``
    and ``entropy``.

    Args:
        hidden: (..., D) last hidden states; fp32, bf16, fp16 or fp64.
        weight: (V, D) LM-head weight of the same dtype (under autocast any).
        target: (...) int64 ids in [0, V); -100 marks a row that costs nothing and gives 0.
        bias: (V,) or None.
        temperature: a float > 0, or one value per row, shaped as ``target``; no gradient.
        logit_scale: a factor on the logits (Cohere, Granite).
        softcap: bound of the logits (Gemma), or None.
        outputs: which of ``logprobs, entropy, lse, is_top1, sum_sq_probs`` to return.
        precision: ``"fp32"`` keeps the accumulators of the product unrounded; ``"input"`` rounds
            logits to the input dtype, as inference engines do.
        backend: a name of :func:`available_backends`, or ``"auto"``.
        max_workspace_bytes: bound on the logits tile; None: the backend's default.

    Returns:
        :class:`LinearLogprobs`, statistics in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
    """
    _check_outputs(outputs)
    check_floating("hidden", hidden)
    _check_target(hidden, target)
    temperature = row_temperature(temperature, target.shape, hidden)
    transform = Transform(float(logit_scale), softcap, temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, precision)
    choice = choose_backend(backend, hidden.device, hidden.dtype)
    extras = "is_top1" in outputs or "sum_sq_probs" in outputs
    rows = hidden.reshape(-1, hidden.shape[-1])
    if choice.backend.kernels is None:
        stats = _reference(rows, head, target.reshape(-1), precision)
    else:
        tile = chunk_rows(
            weight.shape[0], hidden.dtype, precision, hidden.device, max_workspace_bytes
        )
        options = HeadOptions.of(transform, precision, choice.backend.name, tile)
        stats = RowStats(*_call_op(rows, head, target.reshape(-1), options, extras))
    values = zip(OUTPUTS, stats, strict=True)
    return LinearLogprobs(
        *(_output(name, value, target) if name in outputs else None for name, value in values)
    )


def _output(name: str, value: Tensor | None, target: Tensor) -> Tensor:
    assert value is not None  # it was asked for
    return (value if name in DIFFERENTIABLE else value.detach()).reshape(target.shape)


class HeadOptions(NamedTuple):
    """The scalar arguments of the ops, as they stand in the schema."""

    temperature: float
    logit_scale: float
    softcap: float | None
    precision: str
    backend: str
    tile_rows: int

    @staticmethod
    def of(transform: Transform, precision: str, backend: str, tile_rows: int) -> HeadOptions:
        scalar = transform.temperature if isinstance(transform.temperature, float | int) else 1.0
        return HeadOptions(
            float(scalar), transform.logit_scale, transform.softcap, precision, backend, tile_rows
        )

    def head(self, weight: Tensor, bias: Tensor | None, row_temperature: Tensor | None) -> Head:
        temperature = self.temperature if row_temperature is None else row_temperature
        return Head(weight, bias, Transform(self.logit_scale, self.softcap, temperature))


_OPTIONS = (
    "float temperature, float logit_scale, float? softcap, str precision, str backend, "
    "int tile_rows"
)
_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? row_temperature"


def _call_op(
    hidden: Tensor, head: Head, target: Tensor, options: HeadOptions, extras: bool
) -> tuple[Tensor, ...]:
    temperature = head.transform.temperature
    per_row = temperature if isinstance(temperature, Tensor) else None
    return linear_logprobs_forward(
        hidden, head.weight, head.bias, target, per_row, *options, extras
    )


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}, bool extras) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_logprobs_forward(hidden, weight, bias, target, row_temperature, *rest):
    """Statistics of (T, D) rows; without ``extras`` the last two outputs are empty."""
    options, extras = HeadOptions(*rest[:-1]), rest[-1]
    head = options.head(weight, bias, row_temperature)
    keep = _valid_rows(target, weight.shape[0])
    with torch.no_grad():
        stats = forward(
            *_kept(keep, hidden, head, target),
            _execution(options, _count(keep, target), hidden, extras),
        )
    stats = stats._replace(lse=stats.lse.to(stats.logp.dtype))  # native kernels keep it in fp64
    filled = tuple(_scatter(keep, value, target) for value in stats if value is not None)
    empty = hidden.new_empty(0, dtype=stats.logp.dtype)
    return filled if extras else (*filled, empty.bool(), empty)


@linear_logprobs_forward.register_fake
def _(hidden, weight, bias, target, row_temperature, *rest):
    def rows(dtype: torch.dtype) -> Tensor:
        return hidden.new_empty(target.shape, dtype=dtype)

    wide, extras = stats_dtype(hidden.dtype), rest[-1]
    empty = hidden.new_empty(0, dtype=wide)
    last = (rows(torch.bool), rows(wide)) if extras else (empty.bool(), empty)
    return rows(wide), rows(wide), rows(wide), *last


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs_backward",
    mutates_args=(),
    schema=(
        f"({_TENSORS}, {_OPTIONS}, Tensor dlogp, Tensor? dentropy, bool[] needs)"
        " -> (Tensor, Tensor, Tensor)"
    ),
)
def linear_logprobs_backward(hidden, weight, bias, target, row_temperature, *rest):
    """Gradients of hidden, weight and bias; one that is not needed is empty."""
    options, (dlogp, dentropy, needs) = HeadOptions(*rest[:-3]), rest[-3:]
    head = options.head(weight, bias, row_temperature)
    keep = _valid_rows(target, weight.shape[0])
    kept_hidden, kept_head, kept_target = _kept(keep, hidden, head, target)
    if keep is not None:
        dlogp = dlogp[keep]
        dentropy = dentropy[keep] if dentropy is not None else None

    def middle(rows: slice, stats: RowStats) -> tuple[Tensor, Tensor | None]:
        return dlogp[rows], dentropy[rows] if dentropy is not None else None

    execution = _execution(options, _count(keep, target), hidden, extras=False)
    _, gradients = forward_backward(
        kept_hidden, kept_head, kept_target, execution, middle, Needs(*needs),
        fp16_gradient_scale(hidden, _largest(dlogp, dentropy)),
    )  # fmt: skip
    dhidden = gradients.hidden
    if dhidden is not None and keep is not None:
        dhidden = dhidden.new_zeros(hidden.shape).index_copy(0, keep, dhidden)
    wanted = (dhidden, gradients.weight, gradients.bias)
    return tuple(
        gradient.to(x.dtype) if gradient is not None else hidden.new_empty(0)
        for gradient, x in zip(wanted, (hidden, weight, bias), strict=True)
    )


@linear_logprobs_backward.register_fake
def _(hidden, weight, bias, target, row_temperature, *rest):
    inputs, needs = (hidden, weight, bias), rest[-1]
    return tuple(
        x.new_empty(x.shape) if needed else hidden.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:-1]


def _backward(ctx, dlogp, dentropy, dlse, dtop1, dsum_sq):
    hidden, weight, bias, target, row_temperature = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    if dlogp is None:
        dlogp = hidden.new_zeros(target.shape, dtype=stats_dtype(hidden.dtype))
    gradients = linear_logprobs_backward(
        hidden, weight, bias, target, row_temperature, *ctx.options,
        dlogp.contiguous(), dentropy.contiguous() if dentropy is not None else None, needs,
    )  # fmt: skip
    wanted = [grad if needed else None for grad, needed in zip(gradients, needs, strict=True)]
    return (*wanted, *[None] * (len(ctx.options) + 3))


linear_logprobs_forward.register_autograd(_backward, setup_context=_setup_context)


def _check_outputs(outputs: tuple[str, ...]) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if isinstance(outputs, str) or unknown or not outputs:
        raise ValueError(
            f"outputs: expected a tuple of names among {', '.join(OUTPUTS)}; got {outputs!r}"
        )


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


def _reference(hidden: Tensor, head: Head, target: Tensor, precision: str) -> RowStats:
    keep = _valid_rows(target, head.weight.shape[0])
    stats = reference_logprobs(*_kept(keep, hidden, head, target), precision)
    return RowStats(*(_scatter(keep, value, target) for value in stats if value is not None))


def _valid_rows(target: Tensor, columns: int) -> Tensor | None:
    """Index of the rows that carry a target, None when all do; one host transfer."""
    if target.numel() == 0:
        return None
    valid = target != IGNORE_INDEX
    inside = torch.where(valid, target, 0)
    low, high, count = torch.stack([inside.amin(), inside.amax(), valid.sum()]).tolist()
    check_target_range(low, high, columns)
    if count == target.numel():
        return None
    return torch.argsort(~valid, stable=True)[:count]


def _kept(
    keep: Tensor | None, hidden: Tensor, head: Head, target: Tensor
) -> tuple[Tensor, Head, Tensor]:
    if keep is None:
        return hidden, head, target
    return hidden[keep], head.rows(keep), target[keep]


def _count(keep: Tensor | None, target: Tensor) -> int:
    return target.numel() if keep is None else keep.numel()


def _scatter(keep: Tensor | None, values: Tensor, target: Tensor) -> Tensor:
    if keep is None:
        return values
    return values.new_zeros(target.shape).index_copy(0, keep, values)


def _execution(options: HeadOptions, rows: int, hidden: Tensor, extras: bool) -> Execution:
    choice = choose_backend(options.backend, hidden.device, hidden.dtype)
    chunks = row_chunks(rows, options.tile_rows)
    return Execution(choice.kernels(), chunks, options.precision, extras)


def _largest(dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
    """The largest coefficient, a () tensor; 1 when there is none."""
    both = [dlogp] if dentropy is None else [dlogp, dentropy]
    values = torch.cat([*both, dlogp.new_zeros(1)])
    largest = values.abs().amax()
    return torch.where(largest > 0, largest, 1.0)
