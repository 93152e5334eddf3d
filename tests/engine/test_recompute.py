"""The backward in slices of the vocabulary: every backend against fp64, and how it cuts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import linear_logprobs
from grpo_kernels.engine import recompute
from grpo_kernels.engine.recompute import cut
from tests.support.targets import targets

T, D, V = 13, 16, 133
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(
    dtype: torch.dtype, device: torch.device, backend: str, **options: object
) -> list[Tensor]:
    """Return the gradients of hidden, weight and bias; row 3 has no target."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((T, D), (V, D), (V,))
    values = (torch.randn(shape, generator=generator) * 0.5 for shape in shapes)
    rounded = options.pop("rounded", dtype)
    hidden, weight, bias = (
        x.to(rounded).to(device, dtype).requires_grad_()
        for x in values  # type: ignore[call-overload]
    )
    target = torch.randint(V, (T,), generator=generator).to(device)
    target[3] = -100
    out = linear_logprobs(
        hidden, weight, target, bias=bias, outputs=("logprobs", "entropy"), backend=backend,
        **options,
    )  # type: ignore[arg-type]  # fmt: skip
    outer = torch.randn(2, T, generator=generator).to(device)
    assert out.logprobs is not None and out.entropy is not None
    (outer[0] * out.logprobs + outer[1] * out.entropy).sum().backward()
    return [x.grad for x in (hidden, weight, bias) if x.grad is not None]


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", (V, 40, 1))  # of a full-width tile that fits
def test_equals_fp64(
    narrow_slices: None, backend: str, device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    options: dict[str, object] = dict(softcap=3.0, temperature=0.7)
    exact = gradients(torch.float64, torch.device("cpu"), "reference", rounded=dtype, **options)
    got = gradients(dtype, device, backend, max_workspace_bytes=rows * V * 4, **options)
    for ours, theirs in zip(got, exact, strict=True):
        error = (ours.cpu().double() - theirs).abs().max() / theirs.abs().max()
        assert error < ROUNDING[dtype]


def test_cuts_cover_everything_within_the_tile() -> None:
    for rows, columns, elements in [
        (1, 1, 1), (0, 50, 10), (7, 300_000, 1 << 20), (65_536, 151_936, 1 << 26),
        (512, 151_936, 151_936), (4096, 151_936, 4096 * 151_936), (3, 2049, 10**9),
    ]:  # fmt: skip
        slices = cut(rows, columns, columns, elements, block=16)
        for parts, total in ((slices.rows, rows), (slices.columns, columns)):
            assert [part.start for part in parts] == [0, *(p.stop for p in parts[:-1])][
                : len(parts)
            ]
            assert (parts[-1].stop if parts else 0) == total
        # a row is never cut below the narrowest slice
        size = slices.longest_rows * slices.longest_columns
        assert size <= max(elements, min(columns, recompute._MIN_COLUMNS))


def test_no_wide_copy_of_the_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many slices and one range of rows, each is written to the result at once."""
    seen = []
    monkeypatch.setattr(recompute, "_MAX_COLUMNS", 128)
    monkeypatch.setattr(
        recompute, "_store", lambda place, summed, scale: seen.append((place, summed))
    )
    gradients(torch.bfloat16, torch.device("cpu"), "chunked")
    assert len(seen) == 2 and all(place.data_ptr() == x.data_ptr() for place, x in seen)
