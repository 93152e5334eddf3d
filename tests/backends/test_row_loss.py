"""The row kernel with a loss inside, read once: factor and exponentials against fp64 autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels.backends import StatsGradients, Tile, TileGradient
from grpo_kernels.backends.triton import MAX_VALUES, TRITON_ROWS, RowFunction, row_loss_
from grpo_kernels.backends.triton.codegen import PointwiseKernel
from grpo_kernels.head import Transform
from tests.backends.test_rows import PLAIN, dlogits

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

COLUMNS = (1, 5, 1007, 4096 + 77)  # one, few, an odd count, more than one tile
ROWS = 6


def exact_gradient(
    logits: Tensor, target: Tensor, dlogp: Tensor, transform: Transform = PLAIN
) -> Tensor:
    return dlogits(logits, target, transform, StatsGradients(dlogp), torch.float64)


def run(
    logits: Tensor,
    target: Tensor,
    dlogp: Tensor,
    transform: Transform = PLAIN,
) -> tuple[Tensor, Tensor, TileGradient]:
    """Return log-probabilities, what rows add to the loss ``dlogp * logp``, and the gradient."""

    def loss(logp: Tensor, entropy: Tensor, dlogp: Tensor, *unused: Tensor) -> tuple[Tensor, ...]:
        return logp * dlogp, dlogp

    kernel = PointwiseKernel.trace(loss, 2 + MAX_VALUES)
    function = RowFunction(device_function=kernel.device_function, has_dentropy=False)
    tile = Tile(logits.clone(), target, transform)
    values = (dlogp, *[None] * (MAX_VALUES - 1))
    stats, each, gradient = row_loss_(tile, function, values, torch.bfloat16)
    plain = TRITON_ROWS.stats(Tile(logits, target, transform), False)
    torch.testing.assert_close(stats, plain, rtol=0, atol=0, equal_nan=True)  # the same bits
    return stats.logp, each, gradient


def assert_rounded(gradient: TileGradient, exact: Tensor, slack: float | Tensor = 1e-12) -> None:
    """Allow every entry two roundings to bf16; the interpreter's cut off, a unit each."""
    assert gradient.factor is not None
    ours = gradient.dlogits.double() * gradient.factor[:, None].double()
    allowed = 2.0**-6 * exact.abs() + slack
    assert torch.isfinite(ours).all()
    assert ((ours - exact).abs() <= allowed).all(), ((ours - exact).abs() / allowed).max()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient(device: torch.device, columns: int, scale: float, dtype: torch.dtype) -> None:
    """At the larger scales targets lie hundreds of nats below the peak, and the anchor rises."""
    logits = (scale * torch.randn(ROWS, columns, device=device)).to(dtype)
    target = torch.randint(columns, (ROWS,), device=device)
    dlogp = torch.randn(ROWS, device=device)
    logp, each, gradient = run(logits, target, dlogp)
    assert gradient.dlogits.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
    assert_rounded(gradient, exact_gradient(logits, target, dlogp))
    torch.testing.assert_close(each, logp * dlogp)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_transforms(device: torch.device, per_row: bool, softcap: float | None) -> None:
    temperature = 0.5 + torch.rand(ROWS, device=device) if per_row else 0.7
    transform = Transform(logit_scale=1.5, softcap=softcap, temperature=temperature)
    logits, target = 4 * torch.randn(ROWS, 2100, device=device), torch.arange(ROWS, device=device)
    dlogp = torch.randn(ROWS, device=device)
    _, _, gradient = run(logits, target, dlogp, transform)
    assert_rounded(gradient, exact_gradient(logits, target, dlogp, transform))


@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
def test_a_peak_that_comes_late_or_early(device: torch.device, place: int) -> None:
    """What was written relative to a low anchor follows when the anchor rises."""
    logits = torch.randn(2, 5000, device=device)
    logits[0, place], logits[1, place] = 60.0, 30.0
    logits[1, :] += torch.linspace(0, 200, 5000, device=device)  # rises again and again
    target = torch.tensor([7, 3], device=device)
    dlogp = torch.tensor([1.0, -2.0], device=device)
    _, _, gradient = run(logits, target, dlogp)
    assert_rounded(gradient, exact_gradient(logits, target, dlogp))


def test_peaked_rows(device: torch.device) -> None:
    """Where the target has nearly all of the mass, its rivals keep their digits, and 1 - p those
    that the fp32 log-probability has."""
    logits = torch.randn(ROWS, 3000, device=device)
    target = torch.arange(ROWS, device=device)
    logits[torch.arange(ROWS), target] = torch.tensor([9.0, 14, 17, 19, 21, 23], device=device)
    dlogp = torch.ones(ROWS, device=device)
    _, _, gradient = run(logits, target, dlogp)
    exact = exact_gradient(logits, target, dlogp)
    at_target = torch.nn.functional.one_hot(target, 3000).double()
    assert_rounded(gradient, exact, 1e-12 + 2.4e-7 * at_target)


def test_infinite_logits(device: torch.device) -> None:
    """Columns of -inf have no gradient, a target of -inf has its own."""
    logits = torch.randn(3, 2500, device=device)
    logits[:, 100:2300] = -torch.inf
    target = torch.tensor([5, 150, 2400], device=device)
    dlogp = torch.ones(3, device=device)
    logp, _, gradient = run(logits, target, dlogp)
    assert gradient.factor is not None
    ours = gradient.dlogits.double() * gradient.factor[:, None].double()
    p = logits.double().softmax(-1)
    exact = torch.nn.functional.one_hot(target, 2500) - p
    assert logp[1] == -torch.inf
    assert ((ours - exact).abs() <= 2.0**-6 * exact.abs() + 1e-12).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_without_weight_are_finite(device: torch.device, value: float) -> None:
    logits = torch.randn(3, 2500, device=device)
    logits[1, 1234] = value
    target, dlogp = torch.zeros(3, dtype=torch.int64, device=device), torch.ones(3, device=device)
    dlogp[1] = 0
    _, _, gradient = run(logits, target, dlogp)
    assert gradient.factor is not None and gradient.factor[1] == 0
    assert torch.isfinite(gradient.dlogits).all()
    dlogp[1] = 1
    _, _, gradient = run(logits, target, dlogp)
    assert not torch.isfinite(gradient.dlogits[1].float() * gradient.factor[1]).all()
