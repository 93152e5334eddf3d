"""Generated Triton kernels against the torch functions they were traced from."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels.backends.triton.codegen import PointwiseKernel, UntraceableError
from grpo_kernels.losses.terms import KL_ESTIMATORS

ULP = torch.finfo(torch.float32).eps / 2
TINY = torch.finfo(torch.float32).tiny
# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LENGTH = 1500  # more than one program, not a whole number of them


def with_gradient(loss_of: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function (lp, ...) -> the per-token loss and its derivative with respect to lp."""

    def both(lp: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        lp = lp.detach().requires_grad_()
        loss = loss_of(lp, *others)
        (dlp,) = torch.autograd.grad(loss.sum(), lp)
        return loss.detach(), dlp

    return both


def assert_as_torch(
    fn: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
    kernel: PointwiseKernel,
    relative: bool = False,
) -> None:
    """Check for torch's NaNs and infinities, and errors against fp64 of at most twice torch fp32's.

    ``relative`` compares relative errors, for a single operation: sums cancel.
    """
    got, want = kernel(*inputs), fn(*inputs)
    exact = fn(*(value.double() for value in inputs))
    for ours, eager, reference in zip(got, want, exact, strict=True):
        assert ours.shape == eager.shape and ours.dtype == eager.dtype
        ours, eager, reference = ours.double(), eager.double(), reference.double()
        assert torch.equal(ours.isnan(), eager.isnan())
        assert torch.equal(ours.isinf(), eager.isinf())
        finite = eager.isfinite()
        reference = reference[finite]
        scale = reference.abs() + TINY if relative else torch.ones_like(reference)
        error = (ours[finite] - reference).abs() / scale
        eager_error = ((eager[finite] - reference).abs() / scale).max()
        allowed = 2 * eager_error + 4 * ULP * reference.abs() / scale
        assert (error <= allowed).all(), (error - allowed).max()


def vectors(count: int, device: torch.device, scale: float = 1.0) -> list[Tensor]:
    return [torch.randn(LENGTH, device=device) * scale for _ in range(count)]


NAMES = ("lp", "lo", "advantage", "lr")


def _smooth(lp: Tensor, lo: Tensor, advantage: Tensor, lr: Tensor) -> Tensor:
    drift = torch.tanh(3 * (lp - lo))
    gate = torch.nn.functional.softplus(lr) / torch.sqrt(1 + advantage.square())
    return gate * drift - torch.nn.functional.logsigmoid(lp).masked_fill(advantage > 0, 0.0)


def _powers(lp: Tensor, lo: Tensor, advantage: Tensor, lr: Tensor) -> Tensor:
    near = ((lp - lo).abs() <= 0.5) & ~(advantage == 0) | (lr != lr)
    return near.to(lp.dtype) * (lp**3 - lp**-2) + torch.maximum(lp, lr).sign() * lp.reciprocal()


@pytest.mark.parametrize("loss_of", (_smooth, _powers))
def test_loss_and_derivative(loss_of: Callable[..., Tensor], device: torch.device) -> None:
    fn = with_gradient(loss_of)
    kernel = PointwiseKernel.trace(fn, NAMES)
    assert "lp_ptr" in kernel.source
    assert_as_torch(fn, vectors(4, device, scale=0.5), kernel)


EXTREMES = (0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 19.9, -20.1, 88.5, -103.0, 150.0, -150.0, 3e38)
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "minimum": lambda x: torch.minimum(x, torch.zeros_like(x)),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "k3": KL_ESTIMATORS["k3"],
    "k3, derivative": lambda x: with_gradient(KL_ESTIMATORS["k3"])(x)[1],
    "log": torch.log,
    "log1p": torch.log1p,
    "nan_to_num": lambda x: x.nan_to_num(nan=0.5, posinf=2.0, neginf=-3.0),
    "pow0": lambda x: x**0,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "is_finite": lambda x: x.isfinite().to(x.dtype),
    "not": lambda x: (~(x > 0)).to(x.dtype),
}


@pytest.mark.parametrize("name", UNARY)
def test_operation_at_extremes(name: str, device: torch.device) -> None:
    special = torch.tensor([*EXTREMES, math.inf, -math.inf, math.nan], device=device)
    x = torch.cat([special, *vectors(1, device), *vectors(1, device, scale=1e-4)])
    kernel = PointwiseKernel.trace(lambda x: (UNARY[name](x),), ("x",))
    assert_as_torch(lambda x: (UNARY[name](x),), [x], kernel, relative=True)


SCALE = torch.tensor(2.0)


def _changes_a_view(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y.detach().add_(1)
    return (y,)


UNTRACEABLE: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], str]] = {
    "reduction": (lambda x: (x - x.mean(),), "mean"),
    "scan": (lambda x: (x.cumsum(0),), "cumsum"),
    "reversal": (lambda x: (x.flip(0),), "flip"),
    "output shape": (lambda x: (x.sum(),), r"output 0: expected a \(T,\) vector, got \(\)"),
    "length": (lambda x: (x / x.shape[0],), "length"),
    "data-dependent": (lambda x: (x if x.sum() > 0 else -x,), "depends on values"),
    "item": (lambda x: (x * x[0].item(),), "select"),
    "closure": (lambda x: (x * SCALE,), "closed over"),
    "unknown operation": (lambda x: (torch.erfinv(x),), "erfinv"),
    "exponent": (lambda x: (x**1.5,), "exponent 1.5"),
    "fp64": (lambda x: (x.double().exp().float(),), "float64"),
    "alpha": (lambda x: (torch.add(x, x, alpha=2),), "alpha"),
    "mutated view": (_changes_a_view, "in place"),
    "mutated input": (lambda x: (x.add_(1),), "in place"),
    "rounding": (lambda x: (torch.div(x, 2, rounding_mode="floor"),), "div|floor"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced_is_named(name: str) -> None:
    fn, message = UNTRACEABLE[name]
    with pytest.raises(UntraceableError, match=message):
        PointwiseKernel.trace(fn, ("x",))
