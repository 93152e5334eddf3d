"""linear_policy_loss inside torch.compile: one op that the compiler does not look into.

The op runs the function as it is outside: the same choices, the same bits. What the compiler sees
is tensors in and tensors out, so it depends neither on the lengths of a batch nor on the loss.
"""

from __future__ import annotations

import array
import functools
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.base import stats_dtype
from grpo_kernels.batch.opaque import from_bytes, to_bytes
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.head.checks import autocast_dtype
from grpo_kernels.head.derivatives import check_plain, no_second_derivative
from grpo_kernels.head.lora import HeadLoRA
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, Stat

_MAX_METRICS = 64
_BATCH_FIELDS = tuple(field.name for field in fields(TokenBatch) if "Tensor" in str(field.type))
_KEPT_FIELDS = tuple(field.name for field in fields(SamplingMask) if "Tensor" in str(field.type))


class Inputs(NamedTuple):
    """The tensors that can need a gradient."""

    hidden: Tensor  # (..., D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    lora_a: Tensor | None  # (r, D)
    lora_b: Tensor | None  # (V, r)


class Settings(NamedTuple):
    """The keyword arguments of ``linear_policy_loss`` that are no tensors, as in the schema."""

    lora_scaling: float
    logit_scale: float
    softcap: float | None
    precision: str
    backend: str
    schedule: str
    max_workspace_bytes: int | None
    batch_invariant: bool
    metrics: str


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b"
_GRADIENTS = ", ".join(["Tensor"] * len(Inputs._fields))
_SETTINGS = (
    "float lora_scaling, float logit_scale, float? softcap, str precision, str backend, "
    "str schedule, int? max_workspace_bytes, bool batch_invariant, str metrics"
)


def compiled_policy_loss(
    inputs: Inputs, batch: TokenBatch, config: LossConfig, settings: Settings
) -> PolicyLossOutput:
    """``linear_policy_loss`` for a compiler: traced by dynamo, and one op in its graph."""
    check_plain(**inputs._asdict())
    enabled = torch.is_grad_enabled()
    needs = [enabled and x is not None and x.requires_grad for x in inputs]
    tensors = [getattr(batch, name) for name in _BATCH_FIELDS]
    sampling_mask = batch.sampling_mask
    tensors += [
        None if sampling_mask is None else getattr(sampling_mask, name) for name in _KEPT_FIELDS
    ]
    # a number in place of a tensor is among the batch's bytes
    tensors = [x if isinstance(x, Tensor) else None for x in tensors]
    loss, table, names, _ = policy_loss_forward(
        *inputs, needs, tensors, batch.packed, config.packed,
        autocast_dtype(inputs.hidden.device), *settings,
    )  # fmt: skip
    return PolicyLossOutput(loss, _TabledMetrics(table, names))


class _TabledMetrics(Metrics):
    """Metrics in one tensor; they are taken apart when somebody first looks, outside the graph."""

    def __init__(self, table: Tensor, names: Tensor) -> None:
        self._table, self._names = table, names

    @functools.cached_property
    def stats(self) -> dict[str, Stat]:  # type: ignore[override]
        stats = {}
        for (name, kind, width), row in zip(from_bytes(self._names), self._table, strict=False):
            total = row[:width] if width else row[0]
            stats[name] = Stat(kind, total, row[-1])
        return stats


def _tabled(metrics: Metrics) -> tuple[Tensor, Tensor]:
    """(64, 3) values and, as bytes, what they are."""
    stats = metrics.stats
    assert 0 < len(stats) <= _MAX_METRICS, len(stats)
    rows = [torch.stack([*stat.total.expand(2), stat.count]).double() for stat in stats.values()]
    table = torch.stack(rows)
    padding = table.new_zeros(_MAX_METRICS - len(rows), table.shape[1])
    what = [(name, stat.kind, stat.total.numel() if stat.total.dim() else 0)
            for name, stat in stats.items()]  # fmt: skip
    return torch.cat([table, padding]), to_bytes(what)


class _State(NamedTuple):
    """What a backward needs of its forward."""

    loss: Tensor  # (), with its graph
    inputs: Inputs  # as leaves of it


class _Ticket(array.array):
    """The memory of a tensor that stands for a state, and keeps it alive as long as itself."""

    state: _State | None


_TICKETS: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def _ticket(state: _State | None) -> Tensor:
    number = next(_NUMBERS)
    ticket = _TICKETS[number] = _Ticket("q", [number])
    ticket.state = state
    return torch.frombuffer(ticket, dtype=torch.int64)  # which holds on to `ticket`


@contextmanager
def _recorded() -> Iterator[None]:
    """Autograd inside an op, which torch keeps out of ops."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith("Autograd") or name == "ADInplaceOrView":
            excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@torch.library.custom_op(
    "grpo_kernels::linear_policy_loss",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        f"({_INPUTS}, bool[] needs, Tensor?[] tensors, Tensor packed, Tensor config, "
        f"ScalarType? autocast, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def policy_loss_forward(*arguments):
    """The () loss, a table of the metrics, what is in it, and a ticket for the backward."""
    from grpo_kernels.linear_policy_loss import linear_policy_loss

    given, (needs, tensors, packed, config, autocast, *settings) = _split(arguments)
    leaves = (
        None if x is None else x.detach().requires_grad_(needed)
        for x, needed in zip(given, needs, strict=True)
    )
    inputs = Inputs(*leaves)  # type: ignore[arg-type]
    options = Settings(*settings)._asdict()
    scaling, lora = options.pop("lora_scaling"), None
    if inputs.lora_a is not None and inputs.lora_b is not None:
        lora = HeadLoRA(a=inputs.lora_a, b=inputs.lora_b, scaling=scaling)
    cast = torch.autocast(inputs.hidden.device.type, autocast, enabled=autocast is not None)
    with _recorded(), cast:
        loss, metrics = linear_policy_loss(
            inputs.hidden, inputs.weight, _batch(tensors, packed), from_bytes(config),
            bias=inputs.bias, lora=lora, **options,
        )  # fmt: skip
    state = _State(loss, inputs) if any(needs) else None
    return loss.detach(), *_tabled(metrics), _ticket(state)


def _split(arguments: tuple) -> tuple[Inputs, tuple]:
    count = len(Inputs._fields)
    return Inputs(*arguments[:count]), arguments[count:]


def _batch(tensors: list[Tensor | None], packed: Tensor) -> TokenBatch:
    values = from_bytes(packed)
    max_id = values.pop("mask_max_id", None)
    names = (*_BATCH_FIELDS, *_KEPT_FIELDS)
    given: dict[str, Any] = {
        name: x for name, x in zip(names, tensors, strict=True) if x is not None
    }
    if max_id is not None:
        sampling_mask = {name: given.pop(name) for name in _KEPT_FIELDS}
        given["sampling_mask"] = SamplingMask(**sampling_mask, max_id=max_id)
    return TokenBatch(**values, **given)


@policy_loss_forward.register_fake
def _(*arguments):
    inputs, (_, _, _, _, autocast, *_) = _split(arguments)
    hidden = inputs.hidden
    cast = autocast is not None and hidden.dtype != torch.float64
    dtype = stats_dtype(autocast if cast else hidden.dtype)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty((_MAX_METRICS, 3), dtype=torch.float64),
        torch.empty(to_bytes(None).shape, dtype=torch.uint8),
        torch.empty(1, dtype=torch.int64),
    )


@torch.library.custom_op(
    "grpo_kernels::linear_policy_loss_backward",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=f"({_INPUTS}, bool[] needs, Tensor ticket, Tensor dloss) -> ({_GRADIENTS})",
)
def policy_loss_backward(*arguments):
    """Gradients of the inputs; one that is not needed is empty."""
    inputs, (needs, ticket, dloss) = _split(arguments)
    found = _TICKETS.get(int(ticket))
    state = None if found is None else found.state
    if state is None:
        raise RuntimeError(
            "linear_policy_loss: the backward of this compiled call has lost the state of its "
            "forward; saved tensors of the loss cannot be moved or copied in between"
        )
    wanted = [x for x, needed in zip(state.inputs, needs, strict=True) if x is not None and needed]
    with _recorded():
        # kept, for a second backward
        gradients = iter(torch.autograd.grad(state.loss, wanted, dloss, retain_graph=True))
    return tuple(
        next(gradients).contiguous() if needed else inputs.hidden.new_empty(0) for needed in needs
    )


@policy_loss_backward.register_fake
def _(*arguments):
    inputs, (needs, _, _) = _split(arguments)
    return tuple(
        x.new_empty(x.shape) if x is not None and needed else inputs.hidden.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


def _setup_context(ctx, inputs, output):
    ctx.needs = inputs[len(Inputs._fields)]
    ctx.save_for_backward(*inputs[: len(Inputs._fields)], output[3])


def _backward(ctx, dloss, *_):
    *inputs, ticket = ctx.saved_tensors
    gradients = policy_loss_backward(*inputs, ctx.needs, ticket, dloss)
    wanted = [grad if needed else None for grad, needed in zip(gradients, ctx.needs, strict=True)]
    return (*wanted, None, None, *[None] * (3 + len(Settings._fields)))


policy_loss_forward.register_autograd(_backward, setup_context=_setup_context)
policy_loss_backward.register_autograd(no_second_derivative("linear_policy_loss"))
