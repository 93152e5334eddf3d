"""The rank of the target and the top k, of every backend against a plain sort in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends, explain_logprobs, linear_logprobs
from grpo_kernels.backends import Wanted, topk
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, Transform, stats_dtype
from grpo_kernels.testing import make_problem, poisoned_allocations
from tests.support.op_checks import check_forward
from tests.support.targets import targets

OUTPUTS = ("rank", "topk_logprobs", "topk_indices", "is_top1", "logprobs")
ALL = available_backends()
INFINITY = float("inf")
HEADS: dict[str, dict[str, object]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 1.3},
    "softcapped": {"softcap": 3.0, "temperature": 1.7, "logit_scale": 0.25},
    "per_token": {"temperature": "per token", "softcap": 5.0},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Small whole numbers: every dtype and product forms the same logits, and many are equal."""

    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor  # (V,)
    target: Tensor  # (T,)

    @staticmethod
    def of(rows: int, depth: int, columns: int, dtype: torch.dtype, device: torch.device) -> Case:
        hidden = torch.randint(-2, 3, (rows, depth)).to(device, dtype)
        weight = torch.randint(-1, 2, (columns, depth)).to(device, dtype)
        bias = torch.randint(-1, 2, (columns,)).to(device, dtype)
        return Case(
            hidden=hidden, weight=weight, bias=bias,
            target=torch.randint(0, columns, (rows,)).to(device),
        )  # fmt: skip

    def run(self, top_k: int, **kwargs: object):
        with poisoned_allocations():
            return linear_logprobs(
                self.hidden, self.weight, self.target, bias=self.bias, top_k=top_k,
                outputs=OUTPUTS, **kwargs,
            )  # fmt: skip

    def options(self, head: str) -> dict[str, object]:
        options = dict(HEADS[head])
        if options.get("temperature") == "per token":
            rows = self.target.shape[0]
            options["temperature"] = torch.linspace(0.5, 2, rows, device=self.target.device)
        return options

    def scores(self, **options) -> Tensor:
        """Return (T, V) scores in fp64."""
        z = self.hidden.double() @ self.weight.double().t() + self.bias.double()
        z = z * options.get("logit_scale", 1.0)
        if "softcap" in options:
            z = options["softcap"] * torch.tanh(z / options["softcap"])
        temperature = options.get("temperature", 1.0)
        return z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def assert_sorted_as(out, scores: Tensor, target: Tensor, top_k: int) -> None:
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = (order == target[:, None]).nonzero()[:, 1]
    assert out.rank.dtype == out.topk_indices.dtype == torch.int64
    assert torch.equal(out.rank, rank)
    assert torch.equal(out.is_top1, rank == 0)
    assert torch.equal(out.topk_indices, order[:, :top_k])
    expected = scores.log_softmax(-1).gather(-1, order[:, :top_k])
    assert out.topk_logprobs.dtype == out.logprobs.dtype
    torch.testing.assert_close(out.topk_logprobs.double(), expected, rtol=2e-6, atol=2e-6)
    assert (out.topk_logprobs.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("backend,device", [*targets(), ("reference", torch.device("cpu"))])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("precision", ("fp32", "input"))
def test_matches_a_sort(
    backend: str, device: torch.device, head: str, dtype: torch.dtype, precision: str
) -> None:
    if dtype == torch.float64 and backend in ("cpu", "triton"):
        pytest.skip("no fp64")
    case = Case.of(9, 8, 53, dtype, device)
    options = case.options(head)
    out = case.run(7, backend=backend, precision=precision, **options)
    assert out.topk_logprobs.dtype == stats_dtype(dtype)
    assert_sorted_as(out, case.scores(**options), case.target, 7)


@pytest.mark.parametrize("backend,device", [*targets(), ("reference", torch.device("cpu"))])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_mean(backend: str, device: torch.device, head: str, dtype: torch.dtype) -> None:
    for rows, columns in ((9, 53), (1, 1000), (0, 2)):
        case = Case.of(rows, 8, columns, dtype, device)
        options = case.options(head)
        for outputs in (("mean_logit",), ("mean_logit", "rank", "max_logit")):
            out = linear_logprobs(
                case.hidden, case.weight, case.target, bias=case.bias, outputs=outputs,
                backend=backend, **options,
            )  # fmt: skip
            expected = case.scores(**options).mean(-1)
            torch.testing.assert_close(out.mean_logit.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("columns", (1, 2, 31, 1000))
@pytest.mark.parametrize("rows", (0, 1, 5))
def test_odd_shapes(backend: str, columns: int, rows: int) -> None:
    case = Case.of(rows, 5, columns, torch.float32, torch.device("cpu"))
    for top_k in {1, min(7, columns), columns}:  # of 1000 columns the first two in groups
        out = case.run(top_k, backend=backend)
        assert out.topk_indices.shape == out.topk_logprobs.shape == (rows, top_k)
        assert_sorted_as(out, case.scores(), case.target, top_k)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("outputs", (("rank",), ("topk_indices",), ("topk_logprobs", "is_top1")))
def test_each_alone(backend: str, outputs: tuple[str, ...]) -> None:
    case = Case.of(6, 5, 31, torch.float32, torch.device("cpu"))
    top_k = None if outputs == ("rank",) else 4
    whole = case.run(4, backend=backend)
    out = linear_logprobs(
        case.hidden, case.weight, case.target, bias=case.bias, outputs=outputs, top_k=top_k,
        backend=backend,
    )  # fmt: skip
    for name, value in out._asdict().items():
        if name in outputs:
            assert torch.equal(value, getattr(whole, name)), name
        else:
            assert value is None, name


@pytest.mark.parametrize("backend", [name for name in ALL if name != "reference"])
def test_blocks_and_tiles_change_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(7, 5, 31, torch.float32, torch.device("cpu"))
    whole = case.run(4, backend=backend)
    monkeypatch.setattr(topk, "_CPU_ELEMENTS", 2 * 31)
    split = case.run(4, backend=backend, max_workspace_bytes=31 * 4 * 3)
    assert_sorted_as(split, case.scores(), case.target, 4)
    assert torch.equal(split.rank, whole.rank)


@pytest.mark.parametrize("backend", ALL)
def test_saturated_scores_are_equal(backend: str) -> None:
    """tanh is 1 for all but the first column: those stand in the order of their ids."""
    weight = torch.tensor([[0.0], [50.0], [70.0], [60.0]])
    out = linear_logprobs(
        torch.ones(4, 1), weight, torch.arange(4), softcap=1.0, top_k=4, outputs=OUTPUTS,
        backend=backend,
    )  # fmt: skip
    assert out.rank.tolist() == [3, 0, 1, 2]
    assert out.is_top1.tolist() == [False, True, False, False]
    assert out.topk_indices.tolist() == [[1, 2, 3, 0]] * 4


@pytest.mark.parametrize("backend", ALL)
def test_signed_zeros_are_equal(backend: str) -> None:
    bias = torch.tensor([0.0, -0.0, 1.0, 0.0])
    out = linear_logprobs(
        torch.zeros(4, 2), torch.zeros(4, 2), torch.arange(4), bias=bias, top_k=4,
        outputs=OUTPUTS, backend=backend, precision="input",
    )  # fmt: skip
    assert out.rank.tolist() == [1, 2, 0, 3]
    assert out.topk_indices.tolist() == [[2, 0, 1, 3]] * 4


@pytest.mark.parametrize("backend", ALL)
def test_infinite_and_lost_scores(backend: str) -> None:
    """-inf comes last; a row without a softmax has no order."""
    nan = float("nan")
    rows = [
        [1.0, -INFINITY, 2.0, -INFINITY, 0.0],
        [1.0, nan, 2.0, 0.0, 0.0],
        [1.0, INFINITY, 2.0, 0.0, 0.0],
        [-INFINITY] * 5,
    ]
    target = torch.tensor([3])
    for bias, lost in zip(rows, (False, True, True, True), strict=True):
        out = linear_logprobs(
            torch.zeros(1, 2), torch.zeros(5, 2), target, bias=torch.tensor(bias), top_k=4,
            outputs=OUTPUTS, backend=backend,
        )  # fmt: skip
        assert out.rank.tolist() == [-1 if lost else 4]
        assert out.is_top1.tolist() == [False]
        assert out.topk_indices.tolist() == [[-1] * 4 if lost else [2, 0, 4, 1]]
        if lost:
            assert out.topk_logprobs.isnan().all()
        else:
            assert (
                out.topk_logprobs[0, 3] == -INFINITY and out.topk_logprobs[0, :3].isfinite().all()
            )


def test_few_finite_scores_of_many() -> None:
    bias = torch.full((1000,), -INFINITY)
    bias[[999, 500, 17]] = torch.tensor([1.0, 2.0, 1.0])
    out = linear_logprobs(
        torch.zeros(1, 2), torch.zeros(1000, 2), torch.tensor([3]), bias=bias, top_k=6,
        outputs=OUTPUTS, backend="chunked",
    )  # fmt: skip
    assert out.topk_indices.tolist() == [[500, 17, 999, 0, 1, 2]]
    assert out.rank.item() == 6


@pytest.mark.parametrize("backend", ALL)
def test_masked_rows_and_gradients(backend: str) -> None:
    """Masked rows give 0 as everywhere; the rest of the outputs keeps its gradient."""
    problem = make_problem(2, 3).to("cpu", torch.float32)
    target = problem.target.clone()
    target[0, 1] = -100
    out = linear_logprobs(
        problem.hidden, problem.weight, target, bias=problem.bias, top_k=2, outputs=OUTPUTS,
        backend=backend,
    )  # fmt: skip
    assert out.topk_logprobs.shape == out.topk_indices.shape == (2, 3, 2)
    assert out.rank.shape == (2, 3)
    assert all(getattr(out, name)[0, 1].eq(0).all() for name in OUTPUTS)
    assert not (out.rank.requires_grad or out.topk_logprobs.requires_grad)
    plain = linear_logprobs(problem.hidden, problem.weight, target, bias=problem.bias)
    inputs = (problem.hidden, problem.weight, problem.bias)
    expected = torch.autograd.grad(plain.logprobs.sum(), inputs)
    for found, dx in zip(torch.autograd.grad(out.logprobs.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(found, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_batch_invariant(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    case = Case.of(37, 5, 257, dtype, device)
    options = {"backend": backend, "batch_invariant": True, "max_workspace_bytes": 257 * 4 * 16}
    whole = case.run(5, **options)
    some = torch.tensor([30, 2, 2, 17], device=device)
    part = Case(
        hidden=case.hidden[some], weight=case.weight, bias=case.bias, target=case.target[some]
    )
    out = part.run(5, **options)
    assert all(torch.equal(getattr(out, name), getattr(whole, name)[some]) for name in OUTPUTS)


@pytest.mark.parametrize("backend", [name for name in ALL if name != "reference"])
@pytest.mark.parametrize("rank,top_k", ((True, 0), (False, 3)))
def test_opcheck(backend: str, rank: bool, top_k: int) -> None:
    problem = make_problem(1, 5, values_in=torch.float32).to("cpu", torch.float32)
    head = Head(problem.weight, problem.bias, Transform(temperature=1.5))
    rows = Rows(hidden=problem.hidden[0], head=head, target=problem.target[0])
    options = RunOptions(backend=backend, max_workspace_bytes=2 * 53 * 4)
    check_forward(rows, options, Wanted(True, rank, top_k))


def test_explain_says_that_there_is_a_tile() -> None:
    hidden, weight = torch.zeros(2, 4), torch.zeros(9, 4)
    plan = explain_logprobs(hidden, weight, tiled=True)
    assert "tile" in plan.forward and "a tile of logits: some of what" in str(plan)
    assert "a tile of logits" not in str(explain_logprobs(hidden, weight))


@pytest.mark.parametrize(
    "outputs,top_k,message",
    [
        (("topk_logprobs",), None, "top_k: expected a number of ids for the output 'topk_log"),
        (
            ("logprobs", "topk_indices"),
            None,
            "top_k: expected a number .* 'topk_indices', got None",
        ),
        (("rank",), 3, "top_k: expected None without one of the outputs topk_logprobs, .* got 3"),
        (("topk_indices",), 0, r"top_k: expected 1 to 9 \(V\), got 0"),
        (("topk_indices",), 10, r"top_k: expected 1 to 9 \(V\), got 10"),
        (("topk_indices",), 2.0, "top_k: expected an int, got 2.0"),
        (("topk_indices",), True, "top_k: expected an int, got True"),
        (("ranks",), None, "outputs: expected a tuple of names among .*rank, .* got"),
    ],
)
def test_bad_requests(outputs: tuple[str, ...], top_k: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_logprobs(
            torch.ones(2, 4), torch.ones(9, 4), torch.tensor([1, 2]), outputs=outputs, top_k=top_k
        )
