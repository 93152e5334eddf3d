"""Logits that are read once: factors and exponentials against fp64 autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels.backends import BACKENDS, StatsGrad, Tile, TileGradient
from grpo_kernels.backends.triton import logp_gradient_, row_stats
from tests.backends.problems import (
    BF16,
    FP32,
    SPECIAL_ROWS,
    dlogits,
    transform_of,
)

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def run(tile: Tile, dlogp: Tensor) -> tuple[Tensor, TileGradient]:
    """Return log-probabilities, and the gradient of the loss ``dlogp * logp``."""
    own = tile._replace(logits=tile.logits.clone())
    stats, gradient = logp_gradient_(own)
    plain = row_stats(tile, False)
    torch.testing.assert_close(stats, plain, rtol=0, atol=0, equal_nan=True)  # the same bits
    return stats.logprobs, BACKENDS["triton"].weighted_gradient(gradient, dlogp)


def check(tile: Tile, slack: float | Tensor = 1e-12, exact: Tensor | None = None) -> Tensor:
    """Allow every entry two roundings to bf16; the interpreter's cut off, a unit each."""
    dlogp = torch.linspace(-2, 1, len(tile.target), device=tile.logits.device)
    logp, gradient = run(tile, dlogp)
    if exact is None:
        exact = dlogits(*tile, StatsGrad(torch.ones_like(dlogp)))
    exact = exact * dlogp[:, None].double()
    assert gradient.row_scale is not None
    ours = gradient.dlogits.double() * gradient.row_scale[:, None].double()
    allowed = 2.0**-6 * exact.abs() + slack
    assert torch.isfinite(ours).all()
    assert ((ours - exact).abs() <= allowed).all(), ((ours - exact).abs() / allowed).max()
    return logp


def drawn(columns: int, dtype: torch.dtype = FP32, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    return (scale * torch.randn(6, columns)).to(dtype), torch.randint(columns, (6,))


def posed(device: torch.device, rows: tuple[Tensor, Tensor], name: str = "plain") -> Tile:
    logits, target = (x.to(device) for x in rows)
    return Tile(logits, target, transform_of(name, len(logits), device))


# of 3000 columns in fp32 rows begin at odd places, and those of their gradients do not
@pytest.mark.parametrize(
    "columns,scale",
    [(1, 30.0), (5, 30.0), (1007, 0.3), (1007, 300.0), (3000, 30.0), (4096 + 77, 300.0)],
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradient(device: torch.device, columns: int, scale: float, dtype: torch.dtype) -> None:
    """At the larger scales targets lie hundreds of nats below the peak, and the anchor rises."""
    check(posed(device, drawn(columns, dtype, scale)))


@pytest.mark.parametrize("kind", [name for name in SPECIAL_ROWS if "offset" not in name])
def test_special_rows(device: torch.device, kind: str) -> None:
    """A certain target's rivals keep their digits, and 1 - p those of fp32 log-probabilities."""
    tile = posed(device, SPECIAL_ROWS[kind]())
    at_target = torch.nn.functional.one_hot(tile.target, tile.logits.shape[1]).double()
    check(tile, 1e-12 + (5e-7 * at_target if kind == "nearly certain" else 0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_without_weight_are_finite(device: torch.device, value: float) -> None:
    tile = posed(device, (torch.randn(3, 2500), torch.zeros(3, dtype=torch.int64)))
    tile.logits[1, 1234] = value
    dlogp = torch.ones(3, device=device)
    dlogp[1] = 0
    _, gradient = run(tile, dlogp)
    assert gradient.row_scale is not None and gradient.row_scale[1] == 0
    assert torch.isfinite(gradient.dlogits).all()
    _, gradient = run(tile, torch.ones(3, device=device))
    assert not torch.isfinite(gradient.dlogits[1].float() * gradient.row_scale[1]).all()
