"""The torch.library ops behind linear_logprobs: schema, fake and autograd around the one loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.kept import KeptSet
from grpo_kernels.logprob.dispatch import choose_backend
from grpo_kernels.logprob.head import Head
from grpo_kernels.logprob.path import Path
from grpo_kernels.logprob.recompute import recompute_backward
from grpo_kernels.logprob.rows import EXTRAS, RowStats, Transform, dtype_of, stats_dtype
from grpo_kernels.logprob.schedule import (
    Gradients,
    Needs,
    StatsGradients,
    forward,
    forward_backward,
    fp16_gradient_scale,
    row_chunks,
)
from grpo_kernels.logprob.valid_rows import Rows


class Tensors(NamedTuple):
    """The tensor arguments of the ops, as they stand in the schema."""

    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    target: Tensor  # (T,)
    row_temperature: Tensor | None  # (T,)
    kept_indices: Tensor | None  # of a KeptSet, as the next two
    kept_offsets: Tensor | None
    kept_bounds: Tensor | None

    @staticmethod
    def of(hidden: Tensor, head: Head, target: Tensor, kept: KeptSet | None) -> Tensors:
        temperature = head.transform.temperature
        per_row = temperature if isinstance(temperature, Tensor) else None
        sets = (None, None, None) if kept is None else (kept.indices, kept.offsets, kept.bounds)
        return Tensors(hidden, head.weight, head.bias, target, per_row, *sets)

    @property
    def kept(self) -> KeptSet | None:
        indices, offsets, bounds = self.kept_indices, self.kept_offsets, self.kept_bounds
        if indices is None or offsets is None or bounds is None:
            return None
        return KeptSet(indices=indices, offsets=offsets, bounds=bounds, max_id=-1)  # was checked


class HeadOptions(NamedTuple):
    """The scalar arguments of the ops, as they stand in the schema."""

    temperature: float
    logit_scale: float
    softcap: float | None
    precision: str
    backend: str
    tile_rows: int
    batch_invariant: bool

    @staticmethod
    def of(transform: Transform, path: Path) -> HeadOptions:
        scalar = transform.temperature if isinstance(transform.temperature, float | int) else 1.0
        return HeadOptions(
            float(scalar), transform.logit_scale, transform.softcap, path.precision,
            path.choice.backend.name, path.tile_rows, path.batch_invariant,
        )  # fmt: skip

    def head(self, tensors: Tensors) -> Head:
        temperature = tensors.row_temperature
        transform = Transform(
            self.logit_scale,
            self.softcap,
            self.temperature if temperature is None else temperature,
        )
        return Head(tensors.weight, tensors.bias, transform)

    def rows(self, tensors: Tensors) -> Rows:
        """The rows that carry a target."""
        hidden, target = tensors.hidden, tensors.target
        head = self.head(tensors)
        return Rows(hidden=hidden, head=head, target=target, kept=tensors.kept).valid()

    def path(self, tensors: Tensors) -> Path:
        hidden = tensors.hidden
        return Path.of(
            choose_backend(self.backend, hidden.device, hidden.dtype),
            hidden,
            self.head(tensors),
            self.precision,
            self.tile_rows,
            batch_invariant=self.batch_invariant,
            kept=tensors.kept_indices is not None,
        )


_NUM_TENSORS, _NUM_OPTIONS = len(Tensors._fields), len(HeadOptions._fields)
_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? row_temperature, "
    "Tensor? kept_indices, Tensor? kept_offsets, Tensor? kept_bounds"
)
_OPTIONS = (
    "float temperature, float logit_scale, float? softcap, str precision, str backend, "
    "int tile_rows, bool batch_invariant"
)
_STATS = ", ".join(["Tensor"] * len(RowStats._fields))


def _split(arguments: tuple) -> tuple[Tensors, HeadOptions, tuple]:
    tensors = Tensors(*arguments[:_NUM_TENSORS])
    rest = arguments[_NUM_TENSORS:]
    return tensors, HeadOptions(*rest[:_NUM_OPTIONS]), rest[_NUM_OPTIONS:]


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}, bool extras) -> ({_STATS})",
)
def linear_logprobs_forward(*arguments):
    """Statistics of (T, D) rows in the order of :class:`RowStats`; what was not asked is empty."""
    tensors, options, (extras,) = _split(arguments)
    rows = options.rows(tensors)
    chunks = row_chunks(rows.target.numel(), options.tile_rows)
    with torch.no_grad():
        execution = options.path(tensors).execution(chunks, extras, rows.kept)
        stats = forward(rows.hidden, rows.head, rows.target, execution)
    return tuple(
        rows.spread(value) if value is not None else tensors.hidden.new_empty(0, dtype=dtype)
        for value, dtype in zip(stats, _stats_dtypes(tensors), strict=True)
    )


def _stats_dtypes(tensors: Tensors) -> list[torch.dtype]:
    wide = stats_dtype(tensors.hidden.dtype)
    return [dtype_of(name, wide) for name in RowStats._fields]


@linear_logprobs_forward.register_fake
def _(*arguments):
    tensors, _, (extras,) = _split(arguments)
    shapes = dict.fromkeys(RowStats._fields, tensors.target.shape)
    if not extras:
        shapes.update(dict.fromkeys(EXTRAS, torch.Size((0,))))
    if tensors.kept_indices is None:
        shapes["kept_logp"] = torch.Size((0,))
    return tuple(
        tensors.hidden.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(shapes.values(), _stats_dtypes(tensors), strict=True)
    )


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs_backward",
    mutates_args=(),
    schema=(
        f"({_TENSORS}, {_OPTIONS}, Tensor logp, Tensor entropy, Tensor lse, "
        "Tensor? dlogp, Tensor? dentropy, Tensor? dkept, bool[] needs)"
        " -> (Tensor, Tensor, Tensor)"
    ),
)
def linear_logprobs_backward(*arguments):
    """Gradients of hidden, weight and bias from what the forward found; one that is not needed is
    empty."""
    tensors, options, (logp, entropy, lse, *given, needs) = _split(arguments)
    rows = options.rows(tensors)
    outer = StatsGradients(*(rows.take(gradient) for gradient in given))
    stats = RowStats(*(rows.take(found) for found in (logp, entropy, lse)))  # type: ignore[arg-type]
    path, scale = (
        options.path(tensors),
        fp16_gradient_scale(tensors.hidden, _largest(outer, tensors.hidden)),
    )
    run = recompute_backward if rows.kept is None else _whole_rows
    gradients = run(rows, stats, outer, path, Needs(*needs), scale)
    if gradients.hidden is not None:
        gradients = gradients._replace(hidden=rows.spread(gradients.hidden))
    return tuple(
        gradient.to(x.dtype) if gradient is not None else x.new_empty(0)
        for gradient, x in zip(gradients, _differentiable(tensors), strict=True)
    )


def _whole_rows(
    rows: Rows,
    stats: RowStats,
    outer: StatsGradients,
    path: Path,
    needs: Needs,
    scale: Tensor | None,
) -> Gradients:
    """With a kept set: its gradient needs the logits of all kept ids of a row at once."""

    def middle(chunk: slice, stats: RowStats) -> StatsGradients:
        return outer.rows(chunk)

    execution = path.execution(row_chunks(rows.target.numel(), path.tile_rows), kept=rows.kept)
    found = forward_backward(rows.hidden, rows.head, rows.target, execution, middle, needs, scale)
    return found[1]


@linear_logprobs_backward.register_fake
def _(*arguments):
    tensors, _, (*_, needs) = _split(arguments)
    return tuple(
        x.new_empty(x.shape if needed else 0)
        for x, needed in zip(_differentiable(tensors), needs, strict=True)
    )


def _differentiable(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and bias; for want of a bias, something to make an empty tensor of."""
    hidden, weight, bias = tensors[:3]
    return hidden, weight, hidden if bias is None else bias


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[:3])  # logp, entropy and lse
    ctx.options = inputs[_NUM_TENSORS:-1]


def _backward(ctx, *outer):
    by_name = dict(zip(RowStats._fields, outer, strict=True))
    needs = list(ctx.needs_input_grad[:3])
    gradients = linear_logprobs_backward(
        *ctx.saved_tensors[:_NUM_TENSORS], *ctx.options, *ctx.saved_tensors[_NUM_TENSORS:],
        *(_dense(by_name[name]) for name in ("logp", "entropy", "kept_logp")), needs,
    )  # fmt: skip
    wanted = [grad if needed else None for grad, needed in zip(gradients, needs, strict=True)]
    return (*wanted, *[None] * (_NUM_TENSORS - 3 + _NUM_OPTIONS + 1))


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Contiguous; None also for that of an output which was not asked for."""
    return None if gradient is None or not gradient.numel() else gradient.contiguous()


linear_logprobs_forward.register_autograd(_backward, setup_context=_setup_context)


def _largest(outer: StatsGradients, hidden: Tensor) -> Tensor:
    """The largest coefficient, a () tensor; 1 when there is none."""
    given = [gradient for gradient in outer if gradient is not None]
    values = torch.cat([*given, hidden.new_zeros(1, dtype=stats_dtype(hidden.dtype))])
    largest = values.abs().amax()
    return torch.where(largest > 0, largest, 1.0)
