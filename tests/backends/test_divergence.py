"""The divergence of two tiles and its gradient, on every backend, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_kernels.backends import KINDS, Backend, Divergence, Pair, Tile, output_view
from grpo_kernels.head import Transform
from grpo_kernels.testing import assert_as_exact_as
from tests.backends.conftest import Kernels
from tests.backends.problems import scores_of

FLOOR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
CAPPED = Transform(1.5, 4.0, 0.7)
TORCH = Kernels("torch")


def pair_of(
    kernels: Kernels,
    scale: float = 3.0,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    transform: Transform = Transform(temperature=0.8),  # noqa: B008
    offset: float = 0.0,
) -> Pair:
    """Return tiles whose rows are flat or peaked by ``scale``, with gaps between rows."""
    torch.manual_seed(0)
    rows, columns = kernels.size(33, 5), kernels.size(4133, 1061)
    tiles = []
    for dtype, offset_of in zip(dtypes, (offset, 0.0), strict=True):
        logits = (torch.randn(rows, columns + 3) * scale + offset_of).to(kernels.device, dtype)
        target = torch.zeros(rows, dtype=torch.int64, device=kernels.device)
        tiles.append(Tile(logits[:, :columns], target, transform))
    return with_lse(*tiles)


def with_lse(student: Tile, teacher: Tile) -> Pair:
    lse = [Backend().stats(wide(tile), False).lse for tile in (student, teacher)]
    return Pair(student, teacher, *lse)


def wide(tile: Tile) -> Tile:
    return tile._replace(logits=tile.logits.double())


def results(kernels: Kernels, pair: Pair, divergence: Divergence, out: torch.Tensor) -> dict:
    """Return sums and gradient; the coefficient of the second row is 0."""
    coefficient = torch.linspace(-1, 2, len(pair.lse), device=out.device)
    coefficient[1] = 0
    sums = kernels.backend.divergence_sums(pair, divergence)
    coefficient = coefficient.to(torch.float64 if out.dtype == torch.float64 else torch.float32)
    given = pair, divergence, sums[1], coefficient, out
    gradient = kernels.backend.divergence_gradient_(*given)
    return {"divergence": sums[0], "logp_grad": sums[1], "gradient": gradient}


def exact_and_eager(pair: Pair, divergence: Divergence) -> list[dict]:
    """Return what fp64 gives, and fp32 by autograd, which knows the definition alone."""
    posed = pair._replace(student=wide(pair.student), teacher=wide(pair.teacher))
    exact = results(TORCH, posed, divergence, torch.empty_like(posed.student.logits))
    eager = {}
    for dtype in (torch.float32, torch.float64):
        student = pair.student.logits.detach().to(dtype).requires_grad_()
        logp = scores_of(student, pair.student.transform).log_softmax(-1)
        teacher = scores_of(pair.teacher.logits.to(dtype), pair.teacher.transform).log_softmax(-1)
        each, logp_grad = divergence.terms(logp, teacher)
        coefficient = torch.linspace(-1, 2, len(pair.lse)).to(logp)
        coefficient[1] = 0
        (each.sum(-1) * coefficient).sum().backward()
        eager[dtype] = {
            "divergence": each.sum(-1), "logp_grad": logp_grad.sum(-1), "gradient": student.grad
        }  # fmt: skip
    for name, value in exact.items():  # the gradient is that of the definition
        torch.testing.assert_close(value, eager[torch.float64][name], rtol=1e-9, atol=1e-10)
    return [exact, eager[torch.float32]]


def check(kernels: Kernels, pair: Pair, divergence: Divergence, out: torch.Tensor) -> None:
    exact, eager = exact_and_eager(pair, divergence)
    for name, value in results(kernels, pair, divergence, out).items():
        floor = FLOOR[out.dtype] if name == "gradient" else 1e-6
        assert_as_exact_as(value, eager[name], exact[name], floor, name)
    assert not out[1].any()


@pytest.mark.parametrize("scale", (0.1, 3.0, 40.0))
@pytest.mark.parametrize("kind", KINDS)
def test_flat_and_peaked_rows(kernels: Kernels, kind: str, scale: float) -> None:
    pair = pair_of(kernels, scale)
    out = torch.empty_like(pair.student.logits)
    check(kernels, pair, Divergence(kind=kind, beta=0.3), out)


@pytest.mark.parametrize("kind", KINDS)
def test_softcap_and_offset(kernels: Kernels, kind: str) -> None:
    pair = pair_of(kernels, transform=CAPPED)
    rows = torch.linspace(0.5, 2, len(pair.lse), device=kernels.device)
    capped = replace(CAPPED, temperature=rows)
    pair = with_lse(pair.student, pair.teacher._replace(transform=capped))
    check(kernels, pair, Divergence(kind=kind), torch.empty_like(pair.student.logits))
    far = pair_of(kernels, offset=1e3)
    check(kernels, far, Divergence(kind=kind), torch.empty_like(far.student.logits))


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32,) * 2],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_in_place(kernels: Kernels, kind: str, dtypes: tuple) -> None:
    """In 16 bits, over logits of 16 or 32."""
    pair, divergence = pair_of(kernels, dtypes=dtypes), Divergence(kind=kind, beta=0.7)
    if dtypes == (torch.float32,) * 2:
        exact, eager = exact_and_eager(pair, divergence)
        out = output_view(pair.student.logits, torch.bfloat16)
        got = results(kernels, pair, divergence, out)["gradient"]
        assert_as_exact_as(got, eager["gradient"], exact["gradient"], 8e-3, "gradient")
    else:
        check(kernels, pair, divergence, pair.student.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_ids(kernels: Kernels, kind: str) -> None:
    """Of both, of the student, of the teacher: finite, and as the definition's -1e4 has it."""
    pair = pair_of(kernels)
    student, teacher = pair.student.logits, pair.teacher.logits
    student[:, 5:9] = teacher[:, 7:12] = -torch.inf
    pair = with_lse(pair.student, pair.teacher)
    divergence, out = Divergence(kind=kind, beta=0.3), torch.empty_like(student)
    posed = pair._replace(student=wide(pair.student), teacher=wide(pair.teacher))
    exact = results(TORCH, posed, divergence, torch.empty_like(posed.student.logits))
    for name, value in results(kernels, pair, divergence, out).items():
        assert value.isfinite().all(), name
        assert_as_exact_as(value, value, exact[name], 2e-6, name)
        torch.testing.assert_close(value.double(), exact[name], rtol=2e-5, atol=2e-5)
    assert not out[:, 5:9].any() or kind == "forward_kl"  # of which t is not 0


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions(kernels: Kernels, kind: str) -> None:
    pair = pair_of(kernels)
    same = pair._replace(teacher=pair.student, teacher_lse=pair.lse)
    divergence, out = Divergence(kind=kind), torch.empty_like(pair.student.logits)
    found = results(kernels, same, divergence, out)
    assert found["divergence"].abs().max() < 1e-6 and found["gradient"].abs().max() < 1e-6


def test_a_lost_row_stays_alone(kernels: Kernels) -> None:
    pair = pair_of(kernels)
    pair.student.logits[0, 3] = torch.nan
    found = results(kernels, pair, Divergence(kind="jsd"), torch.empty_like(pair.student.logits))
    lost = found["gradient"].isnan().any(1)
    assert (
        found["divergence"].isnan().tolist() == lost.tolist() == [True] + [False] * (len(lost) - 1)
    )
