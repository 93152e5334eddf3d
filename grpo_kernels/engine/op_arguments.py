"""A call as arguments of a torch.library op: tensors, numbers and names, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo_kernels.engine.options import Bounded, RunOptions
from grpo_kernels.head import Head, HeadLoRA, Transform, VocabShard

INPUTS_SCHEMA = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b"
CALL_SCHEMA = (
    "float temperature, float logit_scale, float? softcap, float lora_scaling, "
    "str? vocab_group, int vocab_rank, int[] vocab_rows, int vocab_size, "
    "str precision, str backend, int? max_workspace_bytes, bool batch_invariant, str schedule, "
    "str metric_rows, int? activation_bytes, bool bounded, float tolerance, int slots, "
    "bool exact_weight, int seed"
)
NUM_INPUTS, NUM_CALL = INPUTS_SCHEMA.count(",") + 1, CALL_SCHEMA.count(",") + 1
_PLAIN = tuple(name for name in RunOptions.__dataclass_fields__ if name != "backward")
_BOUNDED = tuple(Bounded.__dataclass_fields__)
_NO_SHARD = None, 0, [0], 0  # torch takes an empty list for one of tensors


def call_arguments(head: Head, options: RunOptions) -> tuple[Any, ...]:
    """Return what :data:`CALL_SCHEMA` names; temperatures of rows are a tensor of the caller's."""
    transform, lora, shard = head.transform, head.lora, head.shard
    per_row = isinstance(transform.temperature, Tensor)
    bounded = options.bounded or Bounded()
    return (
        1.0 if per_row else float(transform.temperature),
        float(transform.logit_scale),
        None if transform.softcap is None else float(transform.softcap),
        1.0 if lora is None else float(lora.scaling),
        *(
            _NO_SHARD
            if shard is None
            else (shard.group, shard.rank, list(shard.rows), shard.vocab_size)
        ),
        *(getattr(options, name) for name in _PLAIN),
        options.bounded is not None,
        *(getattr(bounded, name) for name in _BOUNDED),
    )


def call_of_arguments(
    inputs: Sequence[Tensor | None],  # of :data:`INPUTS_SCHEMA`
    arguments: Sequence[Any],  # of :data:`CALL_SCHEMA`
    temperature: float | Tensor | None = None,  # in place of the one in ``arguments``
) -> tuple[Head, RunOptions]:
    """Return the head and the options with these :func:`call_arguments`."""
    _, weight, bias, a, b = inputs
    own, scale, softcap, scaling, group, rank, rows, vocab_size, *others = arguments
    transform = Transform(scale, softcap, own if temperature is None else temperature)
    lora = None if a is None or b is None else HeadLoRA(a=a, b=b, scaling=scaling)
    shard = None
    if group is not None:
        shard = VocabShard(group=group, rank=rank, rows=tuple(rows), vocab_size=vocab_size)
    given = dict(zip(_PLAIN, others, strict=False))
    is_bounded, *rest = others[len(_PLAIN) :]
    backward = Bounded(**dict(zip(_BOUNDED, rest, strict=True))) if is_bounded else "exact"
    assert weight is not None
    return Head(weight, bias, transform, lora, shard), RunOptions(**given, backward=backward)
