"""Every variant of every Triton kernel that calls launch, for :mod:`compile_gate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import Entries, kernel_packing
from grpo_kernels.backends.triton import sums
from grpo_kernels.backends.triton.codegen import PointwiseKernel
from grpo_kernels.batch import SCALAR_FIELDS, TOKEN_FIELDS, BatchInputs
from tests.backends import fake_driver
from tests.backends.fake_driver import Variant, ZeroedAllocations
from tests.net import product
from tests.net.calls import CALLS
from tests.net.cases import LOSSES, Case
from tests.net.problem import make_problem

# rows begin at multiples of 16 elements and a product's last step is whole, as in most models;
# only the first holds; neither
_USUAL = {"vocab": 512, "depth": 128}
_UNEVEN = {"vocab": 512, "depth": 136}
_UNALIGNED = {"vocab": 129, "depth": 129}
_FEW_LOSSES = LOSSES[:3]  # one of each dtype; others differ in a generated kernel


def variants_of(target: str) -> list[Variant]:
    """Return what is compiled for a target. Afterwards this process runs no kernel."""
    variants = fake_driver.install(target)
    with ZeroedAllocations():
        for case in _calls():
            product.run(case, make_problem(case))
        _pack()
        _generate()
        _sum_pieces()
    return list(variants.values())


def _calls() -> Iterator[Case]:
    """Yield the net's calls, and calls with all options of rows that begin anywhere."""
    for name, case in CALLS.items():
        if name in _FEW_LOSSES or name not in LOSSES:
            # not a last tile of one row, for which Triton would compile again
            tile_rows = None if case.divergence else case.tile_rows
            yield replace(case, tile_rows=tile_rows, **_USUAL)
    several = CALLS["several tiles"]  # whose exponentials are stored
    yield replace(several, **_UNALIGNED)
    rows = Case(packed=True, backend="triton", row_temperature=True, outputs=("logprobs",))
    yield replace(rows, dtype="bfloat16", bounded=True, **_UNEVEN)
    capped = replace(rows, softcap=2.0, bias=True, **_UNALIGNED)
    entropy = {"outputs": (), "settings": {"entropy_coef": 0.01}, "row_temperature": False}
    for dtype, precision, lora in (
        ("float32", "fp32", 0),
        ("bfloat16", "fp32", 0),
        ("bfloat16", "input", 2),
        ("float16", "input", 2),
    ):
        every = replace(capped, dtype=dtype, precision=precision, lora=lora)
        yield replace(every, outputs=CALLS["log-probabilities"].outputs)
        if dtype != "float16":
            yield replace(every, bounded=True, seed=1, **entropy)
        if dtype == "bfloat16":
            yield replace(every, bounded=True)


def _pack() -> None:
    """Pack nothing but advantages, and all that there may be."""
    target, advantages = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2)
    least = BatchInputs.checked({}, target, advantages, mask=None, cu_seqlens=None, packed=False)
    packing = kernel_packing(least)
    assert packing is not None
    packing.passed((6, 6))
    for mask, column in (
        (torch.bool, torch.float32),
        (torch.int64, torch.bfloat16),
        (torch.float32, torch.float64),
    ):
        values = torch.ones(6, dtype=column)
        fields: dict[str, Any] = dict.fromkeys(TOKEN_FIELDS, values)
        fields |= dict.fromkeys(SCALAR_FIELDS, torch.ones(()))
        every = BatchInputs.checked(
            fields | {"prompt_tokens": torch.tensor([6, 6])},
            target=target.flatten(),
            advantages=values,
            mask=torch.ones(6, dtype=mask),
            cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32),
            packed=True,
        )
        assert kernel_packing(every) is not None


def _generate() -> None:
    """Launch a generated kernel with the shared device functions and every kind of expression."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        ratio = (x - y).clamp(-20, 20).exp()
        gate = torch.where((x > y) & (y != 0), torch.sigmoid(ratio), torch.tanh(y))
        return torch.minimum(ratio, y.log1p()) / gate.sqrt(), x > 0

    PointwiseKernel.trace(function, ("x", "y"))(torch.ones(64), torch.ones(64))


def _sum_pieces() -> None:
    """Sum entries of frequent ids, of which calls as small as these have none."""
    entries = Entries.empty(1, sums._PIECE, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        sums.entries_transposed_matmul(
            entries,
            factor=torch.ones(1),
            rows=torch.ones(1, 128, dtype=dtype),
            out=torch.ones(2, 128, dtype=dtype),
            add=False,
            count=sums._PIECE,
        )
