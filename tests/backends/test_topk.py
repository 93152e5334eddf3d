"""The order of a row's scores, of every backend against a plain sort in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.testing import poisoned_allocations
from tests.net.oracle import LinearHead
from tests.support.targets import targets

OUTPUTS = ("topk_logprobs", "topk_indices", "is_top1", "logprobs", "mean_logit")
ALL = available_backends()
INFINITY, NAN = float("inf"), float("nan")
HEADS: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 1.3},
    "softcapped": {"softcap": 3.0, "temperature": 1.7, "logit_scale": 0.5},
    "per_token": {"softcap": 5.0},  # and a temperature of each target
}
# head, rows, columns: every head at columns that are no multiple of a tile, and the smallest sizes
SHAPES = (
    *((name, 9, 53) for name in HEADS),
    ("scaled", 1, 1000),
    ("per_token", 5, 1),
    ("plain", 0, 7),
    ("softcapped", 0, 1000),
)


def ordered(bias: list[float], backend: str, **options: object) -> list[list]:
    """Return the first columns of a row with these logits, and their log-probabilities."""
    columns = len(bias)
    out = linear_logprobs(
        torch.zeros(columns, 2), torch.zeros(columns, 2), torch.arange(columns),
        bias=torch.tensor(bias), top_k=4, outputs=OUTPUTS, backend=backend, **options,
    )  # fmt: skip
    assert torch.equal(out.is_top1, out.topk_indices[:, 0] == torch.arange(columns))
    assert all(torch.equal(row, out.topk_indices[0]) for row in out.topk_indices)
    return [out.topk_indices[0].tolist(), out.topk_logprobs[0].tolist()]


@pytest.mark.parametrize("backend,device", [*targets(), ("reference", torch.device("cpu"))])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("head,rows,columns", SHAPES)
def test_equal_scores_stand_in_the_order_of_their_ids(
    backend: str, device: torch.device, head: str, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """Small whole numbers: every dtype and product forms the same logits, and many are equal."""
    if dtype == torch.float64 and backend in ("cpu", "triton"):
        pytest.skip("no fp64")
    hidden = torch.randint(-2, 3, (rows, 8)).to(device, dtype)
    weight, bias = torch.randint(-1, 2, (columns, 9)).to(device, dtype).split((8, 1), -1)
    bias = bias[:, 0]
    target = torch.randint(columns, (rows,)).to(device)
    options: dict[str, float | Tensor] = dict(HEADS[head])
    if head == "per_token":
        options["temperature"] = (0.5 + torch.rand(rows)).to(device)
    scores = LinearHead(weight=weight, bias=bias, **options).scores(hidden)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    for top_k in {1, min(7, columns), columns}:  # of 1000 columns the first two in groups
        with poisoned_allocations():
            out = linear_logprobs(
                hidden, weight, target, bias=bias, top_k=top_k, outputs=OUTPUTS, backend=backend,
                **options,
            )  # fmt: skip
        assert torch.equal(out.is_top1, order[:, 0] == target)
        assert torch.equal(out.topk_indices, order[:, :top_k])
        expected = scores.log_softmax(-1).gather(-1, order[:, :top_k])
        torch.testing.assert_close(out.topk_logprobs.double(), expected, rtol=2e-6, atol=2e-6)
        assert (out.topk_logprobs.diff(dim=-1) <= 0).all()
        torch.testing.assert_close(out.mean_logit.double(), scores.mean(-1), rtol=1e-6, atol=1e-6)
        assert out.entropy is None and out.topk_logprobs.dtype == out.logprobs.dtype


@pytest.mark.parametrize("backend", ALL)
def test_unusual_scores(backend: str) -> None:
    """Saturated ones and signed zeros are equal, -inf comes last."""
    saturated = ordered([0.0, 50.0, 70.0, 60.0], backend, softcap=1.0)
    assert saturated[0] == [1, 2, 3, 0]
    zeros = ordered([0.0, -0.0, 1.0, 0.0], backend, precision="input")
    assert zeros[0] == [2, 0, 1, 3]
    first, logprobs = ordered([1.0, -INFINITY, 2.0, -INFINITY, 0.0], backend)
    assert first == [2, 0, 4, 1]
    assert logprobs[3] == -INFINITY and all(map(torch.isfinite, torch.tensor(logprobs[:3])))


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("bad", ([1.0, NAN, 2.0, 0.0], [1.0, INFINITY, 2.0, 0.0], [-INFINITY] * 4))
def test_a_row_without_a_softmax_has_no_order(backend: str, bad: list[float]) -> None:
    out = linear_logprobs(
        torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3]), bias=torch.tensor(bad), top_k=4,
        outputs=OUTPUTS, backend=backend,
    )  # fmt: skip
    assert out.topk_indices.tolist() == [[-1] * 4]
    assert not out.is_top1 and out.topk_logprobs.isnan().all()
