"""torch's own checks of the torch.library ops: schema, fakes and autograd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from grpo_kernels import Bounded, HeadLoRA, SamplingMask, available_backends
from grpo_kernels.backends import OutputSpec
from grpo_kernels.engine import (
    Rows,
    RunOptions,
    linear_logprobs_backward,
    linear_logprobs_forward,
)
from grpo_kernels.engine.compiled_logprobs import op_call
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import make_problem


@dataclass(frozen=True)
class Call:
    options: dict[str, Any] = field(default_factory=lambda: dict(max_workspace_bytes=2 * 53 * 4))
    wanted: OutputSpec = OutputSpec()  # noqa: RUF009
    needs: tuple[bool, ...] = (True, True, False, False, False)
    adapter: bool = False
    masked: bool = False


CALLS = {
    "statistics": Call(wanted=OutputSpec(extras=True)),
    "top k": Call(wanted=OutputSpec(True, True, 3)),
    "an adapter": Call(adapter=True, needs=(True, False, False, True, True)),
    "sampling masks": Call(masked=True),
    "logits kept": Call(dict(activation_bytes=1 << 20)),
    "entries kept": Call(dict(backward=Bounded(slots=64, exact_weight=False))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend,name",
    [("chunked", name) for name in CALLS]
    + [(name, "statistics") for name in available_backends() if name in ("cpu", "triton")],
)
def test_opcheck(backend: str, name: str) -> None:
    call = CALLS[name]
    problem = make_problem(sequences=1, length=5).to("cpu", torch.float32)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((3, 16), (53, 3)))
    transform, lora = Transform(temperature=1.5), HeadLoRA(a=a, b=b) if call.adapter else None
    members = SamplingMask.from_lists([[], [7], [52, 3, 3], list(range(53)), [0]])
    rows = Rows(
        hidden=problem.hidden[0],
        head=Head(problem.weight, problem.bias, transform, lora),
        target=problem.target[0],
        sampling_mask=members if call.masked else None,
    )
    options = RunOptions(backend=backend, **call.options)
    arguments = op_call(rows, options, call.wanted)[:-1]
    for needs in ([False] * 5, [True] * 5):
        opcheck(linear_logprobs_forward, (*arguments, needs))
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    forward = (*arguments, list(call.needs))
    *found, kept = linear_logprobs_forward(*forward)
    dlogp, dentropy, dmasked = torch.randn(3, 5)
    none = None
    grad_outputs = (
        [(none, none, dmasked)] if call.masked else [(dlogp, none, none), (dlogp, dentropy, none)]
    )
    for gradients in grad_outputs:
        opcheck(linear_logprobs_backward, (*forward, [*found[:3], *gradients, kept]))
