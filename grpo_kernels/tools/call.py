"""Sizes and GEMMs of a loss call at an LM head. Nothing is run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels.batch import TokenBatch
from grpo_kernels.common import check_fields, choice
from grpo_kernels.engine import Needs, RunOptions
from grpo_kernels.head import Head
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule import Plan, keeps_exponentials, planned_rows

FP16 = torch.float16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": FP16}
FP32_BYTES = 4  # per element


@dataclass(frozen=True, kw_only=True)
class Call:
    """A loss at an LM head, over ``tokens`` valid tokens that all have a gradient.

    Sizes are in bytes.

    Raises:
        ValueError: a dtype is unknown; the message names the argument.
    """

    # "eager" | "trl"; of grpo-kernels: "one_pass" | "two_pass", or "exponentials", one pass that
    # keeps the exponentials of all rows
    name: str
    hidden: int  # D
    vocabulary: int  # V
    tokens: int  # T
    dtype: torch.dtype = choice(torch.bfloat16, DTYPES.values())  # of the hidden states
    weight_dtype: torch.dtype | None = None  # None: the same; fp32 is for autocast
    frozen: bool = False  # the weight needs no gradient
    softcap: bool = False
    device: str = "cuda"  # | "cpu"
    options: RunOptions = field(default_factory=RunOptions)  # only for grpo-kernels
    sums_dhidden: bool = False  # over the ranks that share the vocabulary; only for grpo-kernels
    teacher: int = 0  # the teacher's hidden size, for a divergence in one pass; 0: no teacher

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weight_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(
                f"weight_dtype: expected torch.float32 or the dtype of the hidden states "
                f"({self.dtype}); got {self.weight_dtype}"
            )

    @property
    def is_narrow(self) -> bool:
        """Whether the hidden states have 16 bits."""
        return self.dtype.itemsize < FP32_BYTES

    @property
    def elements(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weight(self) -> int:
        return self.elements * (self.weight_dtype or self.dtype).itemsize

    @property
    def dweight(self) -> int:
        return 0 if self.frozen else self.weight

    @property
    def cast(self) -> int:
        """Bytes of the weight's copy in the dtype of the hidden states."""
        if self.weight_dtype in (None, self.dtype):
            return 0
        return self.elements * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Bytes of the hidden states."""
        return self.tokens * self.hidden * self.dtype.itemsize

    @property
    def fp32_rows(self) -> int:
        return self.tokens * self.hidden * FP32_BYTES

    @property
    def dhidden(self) -> int:
        """Bytes of the hidden states' gradient before it is multiplied by the loss's gradient."""
        return self.fp32_rows if self.sums_dhidden or self.dtype == FP16 else self.rows

    @property
    def inputs(self) -> int:
        teacher = self.teacher * (self.tokens + self.vocabulary) * self.dtype.itemsize
        return self.rows + self.weight + teacher

    @property
    def returned(self) -> int:
        """Bytes of all gradients."""
        return self.rows + self.dweight

    @property
    def plan(self) -> Plan:
        """The plan of grpo-kernels; only the saved bytes depend on the number of tokens."""
        return replace(_plan(replace(self, tokens=1)), tokens=self.tokens)

    @property
    def keeps(self) -> str | None:
        """What the forward keeps for the backward; None if it cannot keep anything."""
        asked = self.name == "two_pass" or self.options.bounded is not None
        return self.plan.saved.kind if asked else None

    @property
    def gemms(self) -> int:
        """GEMMs over the vocabulary, forward and backward together."""
        if self.keeps is not None:
            return self.plan.saved.gemms
        return (4 if self.name == "trl" or self.teacher else 3) - self.frozen

    @property
    def flop(self) -> float:
        """Operations of these GEMMs."""
        depth = (self.gemms - bool(self.teacher)) * self.hidden + self.teacher
        return 2.0 * self.tokens * self.vocabulary * depth

    @property
    def may_keep_exponentials(self) -> bool:
        """Whether one pass keeps exponentials, on a GPU that stores them instead of logits."""
        if self.device != "cuda" or self.dtype != torch.bfloat16:
            return False
        if self.softcap or self.sums_dhidden or self.teacher:
            return False
        plan = replace(self, name="one_pass").plan
        return keeps_exponentials(plan.route.storing(), plan.head, plan.needs, self.tokens)

    @property
    def default(self) -> str:
        """The choice of ``schedule="auto"`` instead of :attr:`name`, for a loss of token scope."""
        return _plan(replace(self, name="auto")).schedule


@functools.lru_cache
def _plan(call: Call) -> Plan:
    """Return the plan for tensors without memory; the device need not exist here."""
    tokens = call.tokens
    with FakeTensorMode():
        hidden = torch.empty(tokens, call.hidden, dtype=call.dtype, device=call.device)
        weight = torch.empty(call.vocabulary, call.hidden, dtype=call.dtype, device=call.device)
        target = torch.empty(tokens, dtype=torch.int64, device=call.device)
    counts = torch.tensor([[tokens], [tokens]])
    known: Any = {"counts": counts, "layout": counts[0], "max_target": counts.new_zeros(())}
    batch = TokenBatch(target=target, advantages=target, cu_seqlens=target, **known)
    # all backends with tiles plan the same
    schedule = "one_pass" if call.name == "exponentials" else call.name
    options = replace(call.options, backend="chunked", schedule=schedule)
    needs = Needs(hidden=True, weight=not call.frozen)
    _, plan = planned_rows(
        hidden=hidden,
        head=Head(weight),
        batch=batch,
        config=LossConfig(),
        options=options,
        needs=needs,
    )
    return plan
