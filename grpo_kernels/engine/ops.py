"""The torch.library ops behind linear_logprobs: schema, fake and autograd around the one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Transform, dtype_of, shapes_of, stats_dtype
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.engine.recompute import recompute_backward
from grpo_kernels.engine.retry import (
    SPOILED_SUM,
    fewer_rows,
    first_that_fits,
    forward_ways,
    smaller_tile,
)
from grpo_kernels.engine.route import Path, choose_path
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.sweep import (
    Gradients,
    Needs,
    StatsGradients,
    forward,
    forward_backward,
    row_chunks,
)
from grpo_kernels.engine.topk import UNRANKED, Ranking
from grpo_kernels.head.checks import check_row_temperature
from grpo_kernels.head.derivatives import no_second_derivative
from grpo_kernels.head.head import Head, logits_dtype
from grpo_kernels.head.lora import HeadLoRA


class Tensors(NamedTuple):
    """The tensor arguments of the ops, as they stand in the schema."""

    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    target: Tensor  # (T,)
    row_temperature: Tensor | None  # (T,)
    mask_indices: Tensor | None  # of a SamplingMask, as the next two
    mask_offsets: Tensor | None
    mask_bounds: Tensor | None
    lora_a: Tensor | None = None  # (r, D)
    lora_b: Tensor | None = None  # (V, r)

    @staticmethod
    def of(
        hidden: Tensor, head: Head, target: Tensor, sampling_mask: SamplingMask | None
    ) -> Tensors:
        temperature = head.transform.temperature
        per_row = temperature if isinstance(temperature, Tensor) else None
        indices, offsets, bounds = (
            (None, None, None)
            if sampling_mask is None
            else (sampling_mask.indices, sampling_mask.offsets, sampling_mask.bounds)
        )
        plain = (hidden, head.weight, head.bias, target, per_row)
        return Tensors(*plain, indices, offsets, bounds, *head.factors)

    @property
    def sampling_mask(self) -> SamplingMask | None:
        indices, offsets, bounds = self.mask_indices, self.mask_offsets, self.mask_bounds
        if indices is None or offsets is None or bounds is None:
            return None
        return SamplingMask(
            indices=indices, offsets=offsets, bounds=bounds, max_id=-1
        )  # was checked


class HeadOptions(NamedTuple):
    """The scalar arguments of the ops, as they stand in the schema: what the caller asked for.

    The ops decide what runs. So a compiler sees no decision, and guards on none.
    """

    temperature: float
    logit_scale: float
    softcap: float | None
    precision: str
    backend: str
    max_workspace_bytes: int | None
    batch_invariant: bool
    all_valid: bool = False  # every row has a target, and its id was checked
    lora_scaling: float = 1.0

    def head(self, tensors: Tensors) -> Head:
        temperature = tensors.row_temperature
        transform = Transform(
            self.logit_scale,
            self.softcap,
            self.temperature if temperature is None else temperature,
        )
        lora = None
        if tensors.lora_a is not None and tensors.lora_b is not None:
            lora = HeadLoRA(a=tensors.lora_a, b=tensors.lora_b, scaling=self.lora_scaling)
        return Head(tensors.weight, tensors.bias, transform, lora)

    def rows(self, tensors: Tensors, wanted: Tensor | None = None) -> Rows:
        """The rows that carry a target and are ``wanted``, (T,) bool; see :class:`Rows`."""
        hidden, target = tensors.hidden, tensors.target
        rows = Rows(
            hidden=hidden,
            head=self.head(tensors),
            target=target,
            sampling_mask=tensors.sampling_mask,
        )
        return rows.chosen(wanted) if self.all_valid else rows.valid(wanted)

    def path(self, tensors: Tensors, ranking: Ranking = UNRANKED) -> Path:
        return choose_path(
            self.backend,
            tensors.hidden,
            self.head(tensors),
            self.precision,
            self.max_workspace_bytes,
            batch_invariant=self.batch_invariant,
            sampling_mask=tensors.mask_indices is not None,
            ranked=ranking.wanted,
        )

    def advice(self, tensors: Tensors) -> Callable[[Path], str]:
        """What to set where a path with a smaller tile has to step in."""
        dtype = logits_dtype(tensors.hidden.dtype, self.precision)
        return smaller_tile(tensors.weight.shape[0], dtype)


DIFFERENTIABLE = Gradients._fields
_NUM_TENSORS, _NUM_OPTIONS = len(Tensors._fields), len(HeadOptions._fields)
_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? row_temperature, "
    "Tensor? mask_indices, Tensor? mask_offsets, Tensor? mask_bounds, "
    "Tensor? lora_a, Tensor? lora_b"
)
_OPTIONS = (
    "float temperature, float logit_scale, float? softcap, str precision, str backend, "
    "int? max_workspace_bytes, bool batch_invariant, bool all_valid, "
    "float lora_scaling"
)
_ASKED = "bool extras, bool rank, int top_k"
_NUM_ASKED = 1 + len(Ranking._fields)
_STATS = ", ".join(["Tensor"] * len(RowStats._fields))


def _split(arguments: tuple) -> tuple[Tensors, HeadOptions, tuple]:
    tensors = Tensors(*arguments[:_NUM_TENSORS])
    rest = arguments[_NUM_TENSORS:]
    return tensors, HeadOptions(*rest[:_NUM_OPTIONS]), rest[_NUM_OPTIONS:]


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it asks which rows are valid
    schema=f"({_TENSORS}, {_OPTIONS}, {_ASKED}) -> ({_STATS})",
)
def linear_logprobs_forward(*arguments):
    """Statistics of (T, D) rows in the order of :class:`RowStats`; what was not asked is empty."""
    tensors, options, (extras, *order) = _split(arguments)
    ranking = Ranking(*order)
    check_row_temperature(tensors.row_temperature)
    rows, path = options.rows(tensors), options.path(tensors, ranking)

    def run(path: Path) -> RowStats:
        chunks = row_chunks(rows.target.numel(), path.tile_rows)
        execution = path.execution(chunks, extras, rows.sampling_mask, ranking)
        return forward(rows.hidden, rows.head, rows.target, execution)

    with torch.no_grad():
        stats = first_that_fits(run, forward_ways(path), options.advice(tensors))
    return tuple(
        rows.spread(value) if value is not None else tensors.hidden.new_empty(0, dtype=dtype)
        for value, dtype in zip(stats, _stats_dtypes(tensors), strict=True)
    )


def _stats_dtypes(tensors: Tensors) -> list[torch.dtype]:
    wide = stats_dtype(tensors.hidden.dtype)
    return [dtype_of(name, wide) for name in RowStats._fields]


@linear_logprobs_forward.register_fake
def _(*arguments):
    tensors, _, (extras, rank, top_k) = _split(arguments)
    sampling_mask = tensors.mask_indices is not None
    shapes = shapes_of(
        tensors.target.shape, extras=extras, sampling_mask=sampling_mask, rank=rank, top_k=top_k
    )
    return tuple(
        tensors.hidden.new_empty(shapes.get(name, 0), dtype=dtype)
        for name, dtype in zip(RowStats._fields, _stats_dtypes(tensors), strict=True)
    )


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs_backward",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        f"({_TENSORS}, {_OPTIONS}, Tensor logp, Tensor entropy, Tensor lse, "
        "Tensor? dlogp, Tensor? dentropy, Tensor? dmasked, bool[] needs)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def linear_logprobs_backward(*arguments):
    """Gradients of what is differentiable from what the forward found; one that is not needed is
    empty."""
    tensors, options, (logp, entropy, lse, *given, needs) = _split(arguments)
    stats, outer = RowStats(logp, entropy, lse), StatsGradients(*given)
    gradients = head_gradients(tensors, options, stats, outer, Needs(*needs))
    return tuple(
        gradient.to(x.dtype) if gradient is not None else x.new_empty(0)
        for gradient, x in zip(gradients, _differentiable(tensors), strict=True)
    )


def head_gradients(
    tensors: Tensors,
    options: HeadOptions,
    stats: RowStats,  # of all rows: logp, entropy and lse
    outer: StatsGradients,
    needs: Needs,
) -> Gradients:
    """Gradients of what is differentiable, in fp32 or the dtype of the hidden states."""
    rows, path = options.rows(tensors, outer.nonzero), options.path(tensors)
    outer = StatsGradients(*(rows.take(gradient) for gradient in outer))
    stats = RowStats(*(rows.take(found) for found in stats[:3]))  # type: ignore[arg-type]
    run = recompute_backward if rows.sampling_mask is None else _whole_rows
    gradients = first_that_fits(
        lambda path: run(rows, stats, outer, path, needs),
        fewer_rows(path),
        options.advice(tensors),
        lambda _: SPOILED_SUM if needs.weight_sink is not None else None,
    )
    if gradients.hidden is not None:
        gradients = gradients._replace(hidden=rows.spread(gradients.hidden))
    return gradients


def _whole_rows(
    rows: Rows,
    stats: RowStats,
    outer: StatsGradients,
    path: Path,
    needs: Needs,
) -> Gradients:
    """With a sampling mask: its gradient needs the logits of all kept ids of a row at once."""

    def middle(chunk: slice, stats: RowStats) -> StatsGradients:
        return outer.rows(chunk)

    execution = path.execution(
        row_chunks(rows.target.numel(), path.tile_rows), sampling_mask=rows.sampling_mask
    )
    _, gradients = forward_backward(rows.hidden, rows.head, rows.target, execution, middle, needs)
    return gradients


@linear_logprobs_backward.register_fake
def _(*arguments):
    tensors, _, (*_, needs) = _split(arguments)
    return tuple(
        x.new_empty(x.shape if needed else 0)
        for x, needed in zip(_differentiable(tensors), needs, strict=True)
    )


def _differentiable(tensors: Tensors) -> list[Tensor]:
    """The tensors that get gradients; for want of one, something to make an empty tensor of."""
    found = (getattr(tensors, name) for name in DIFFERENTIABLE)
    return [tensors.hidden if x is None else x for x in found]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[:3])  # logp, entropy and lse
    ctx.options = inputs[_NUM_TENSORS:-_NUM_ASKED]


def _backward(ctx, *outer):
    by_name = dict(zip(RowStats._fields, outer, strict=True))
    needed = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
    needs = [needed[name] for name in DIFFERENTIABLE]
    saved = ctx.saved_tensors  # once: a checkpoint hands them out a single time
    gradients = linear_logprobs_backward(
        *saved[:_NUM_TENSORS], *ctx.options, *saved[_NUM_TENSORS:],
        *(_dense(by_name[name]) for name in ("logp", "entropy", "masked_logp")), needs,
    )  # fmt: skip
    found = dict(zip(DIFFERENTIABLE, gradients, strict=True))
    wanted = [found[name] if needed[name] and name in found else None for name in Tensors._fields]
    return (*wanted, *[None] * (_NUM_OPTIONS + _NUM_ASKED))


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Contiguous; None also for that of an output which was not asked for."""
    return None if gradient is None or not gradient.numel() else gradient.contiguous()


linear_logprobs_forward.register_autograd(_backward, setup_context=_setup_context)
linear_logprobs_backward.register_autograd(no_second_derivative("linear_logprobs"))
