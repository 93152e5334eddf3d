"""One pass whose GEMM stores exponentials: kept for the backward, or chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import Bounded, LossConfig, explain, linear_policy_loss
from grpo_kernels.backends import TileGradient
from grpo_kernels.backends.triton_backend import Triton
from grpo_kernels.engine import GradientSums, compaction
from grpo_kernels.schedule import Plan, loss_plan
from grpo_kernels.testing import Problem, assert_all_as_exact_as, make_config, make_problem, run
from tests.support.targets import targets

V, D = 300, 32
# the backend that has such a GEMM
TRITON = [target for target in targets("cpu", "chunked") if target.values[0] == "triton"]
CHUNKED = {"schedule": "one_pass", "max_workspace_bytes": 16 * V * 2}
pytestmark = pytest.mark.parametrize("backend,device", TRITON)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 16 rows."""
    monkeypatch.setattr(loss_plan, "_BLOCK_ROWS", 16)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each launch of the GEMM."""
    rows: list[int] = []
    launch = Triton.linear_logp_gradient

    def counted(self: Triton, hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        rows.append(len(hidden))
        return launch(self, hidden, *arguments, **named)

    monkeypatch.setattr(Triton, "linear_logp_gradient", counted)
    return rows


def plan_of(problem: Problem, config: LossConfig, backend: str, **options: Any) -> Plan:
    return explain(
        problem.hidden, problem.weight, problem.batch(), config, backend=backend, **options
    )


@pytest.mark.parametrize(
    "name,settings,options",
    [
        ("dapo", {}, {}),
        ("dapo", {"beta": 0.05}, {"logit_scale": 1.5}),
        ("gspo", {}, {}),  # its ratio is one of sequences
        ("dapo", {"top_entropy_quantile": 0.4}, {"logit_scale": 1.5}),  # its gate: of the batch
    ],
    ids=str,
)
def test_values_and_gradients(
    name: str,
    settings: dict,
    options: dict,
    backend: str,
    device: torch.device,
    calls: list[int],
) -> None:
    problem = make_problem(5, 20, D, V, bias=False)
    config = make_config(name, temperature=0.7, **settings)
    posed = problem.to(device, torch.bfloat16)
    plan = plan_of(posed, config, backend, **options)
    assert plan.keeps and plan.schedule == "one_pass" and "exponentials of" in str(plan)
    exact = run(problem, config, backend="reference", **options)
    eager = run(posed, config, backend="reference", **options)
    ours = run(posed, config, backend=backend, **options)
    assert_all_as_exact_as(ours, eager, exact, 1.2e-2)
    assert calls == [plan.tokens]


@pytest.mark.parametrize("name,frozen", [("dapo", False), ("gspo", True)])
def test_chunks(
    name: str, frozen: bool, backend: str, device: torch.device, calls: list[int]
) -> None:
    """Where the exponentials of all rows do not fit, or need not be kept."""
    problem, config = make_problem(8, 15, D, V, bias=False), make_config(name)
    posed = problem.to(device, torch.bfloat16)
    posed.weight.requires_grad_(not frozen)
    problem.weight.requires_grad_(not frozen)
    plan = plan_of(posed, config, backend, **CHUNKED)
    assert not plan.keeps and len(plan.chunks) > 2 and plan.tile_rows <= 16
    exact, eager = (run(x, config, backend="reference") for x in (problem, posed))
    assert_all_as_exact_as(run(posed, config, backend=backend, **CHUNKED), eager, exact, 1.2e-2)
    assert len(calls) == len(plan.chunks) and sum(calls) == plan.tokens


SPARSE_WAYS: list[dict[str, Any]] = [{}, {"schedule": "two_pass"}, CHUNKED]
HEADS = ("frozen", "exact gradient", "sparse gradient")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", SPARSE_WAYS, ids=str)
def test_sparse_gradients(
    way: dict[str, Any],
    head: str,
    backend: str,
    device: torch.device,
    calls: list[int],
) -> None:
    """Entries come from exponentials: no logit is in memory but those of an exact gradient."""
    frozen = head == "frozen"
    options = way | {"backward": Bounded(exact_weight=head == "exact gradient")}
    config = make_config("gspo" if frozen else "dapo")
    problem = make_problem(8, 15, D, V, bias=False)
    posed = problem.to(device, torch.bfloat16)
    for each in (problem, posed):
        each.weight.requires_grad_(not frozen)
    plan = plan_of(posed, config, backend, **options)
    # exponentials of all rows are for the head's exact gradient
    assert plan.keeps == (head == "exact gradient" and way == {})
    assert "sparse and unbiased" in str(plan)
    exact = run(problem, config, backend="reference")
    eager = run(posed, config, backend="reference")
    ours = run(posed, config, backend=backend, **options)
    assert sum(calls) == plan.tokens and (len(calls) > 2) == ("max_workspace_bytes" in options)
    assert torch.allclose(ours["loss"].double(), exact["loss"].double(), rtol=1e-2, atol=1e-4)
    for gradient in ("dhidden",) if frozen else ("dhidden", "dweight"):
        size = exact[gradient].norm()
        error, usual = ((x[gradient].double() - exact[gradient]).norm() for x in (ours, eager))
        assert error <= usual + 1.5 * Bounded().tolerance * size, (gradient, error / size)


def test_the_gradient_of_the_loss_is_not_rounded_in(backend: str, device: torch.device) -> None:
    """Scaled by 3 the gradient of the hidden states is rounded once."""
    problem, config = make_problem(5, 20, D, V, bias=False), make_config("dapo")
    posed = problem.to(device, torch.bfloat16)
    exact, ours = (
        run(x, config, backend=name, scale=3.0)
        for x, name in ((problem, "reference"), (posed, backend))
    )
    # the exponentials are rounded, and their product with the weight: each by 2**-9 in the mean
    error = (ours["dhidden"].double() - exact["dhidden"]).norm() / exact["dhidden"].norm()
    assert error < 4e-3


def test_a_second_backward_forms_nothing_again(
    backend: str, device: torch.device, calls: list[int]
) -> None:
    posed = make_problem(5, 20, D, V, bias=False).to(device, torch.bfloat16)
    out = linear_policy_loss(
        posed.hidden, posed.weight, posed.batch(), make_config("dapo"), backend=backend
    )
    inputs = (posed.hidden, posed.weight)
    first = torch.autograd.grad(out.loss, inputs, retain_graph=True)
    second = torch.autograd.grad(out.loss, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert len(calls) == 1


def test_main_grad(backend: str, device: torch.device) -> None:
    posed = make_problem(5, 20, D, V, bias=False).to(device, torch.bfloat16)
    config, buffer = make_config("dapo"), torch.ones(V, D, device=device)
    arguments = posed.hidden, posed.weight, posed.batch(), config
    plain = torch.autograd.grad(
        linear_policy_loss(*arguments, backend=backend).loss, (posed.hidden, posed.weight)
    )
    out = linear_policy_loss(*arguments, backend=backend, main_grad=buffer)
    (dhidden,) = torch.autograd.grad(out.loss, posed.hidden)
    assert torch.equal(dhidden, plain[0])
    torch.testing.assert_close(buffer - 1, plain[1].float(), rtol=8e-3, atol=1e-6)


def test_rows_without_weight_may_be_anything(backend: str, device: torch.device) -> None:
    """A token of weight 0 whose hidden state is NaN changes no gradient of another."""
    posed = make_problem(5, 20, D, V, bias=False).to(device, torch.bfloat16)
    config = LossConfig(loss_type="dapo", rollout_correction_mode="token_mask")
    rollout = posed.logprobs["rollout_logprobs"].clone()
    plain = posed.batch(rollout_logprobs=rollout)
    token = plain.rows[3] if plain.rows is not None else 3
    # masked by the correction: far more probable than when it was sampled
    rollout.view(-1)[token] = -40.0
    masked = posed.batch(rollout_logprobs=rollout)

    def gradients(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = hidden.detach().requires_grad_()
        out = linear_policy_loss(hidden, posed.weight, masked, config, backend=backend)
        return torch.autograd.grad(out.loss, (hidden, posed.weight))

    expected = gradients(posed.hidden)
    assert not expected[0].reshape(-1, D)[token].any()
    spoilt = posed.hidden.detach().clone()
    spoilt.view(-1, D)[token] = torch.nan
    dhidden, dweight = gradients(spoilt)
    others = torch.arange(posed.mask.numel(), device=device) != token
    assert torch.equal(dweight, expected[1])
    assert torch.equal(dhidden.view(-1, D)[others], expected[0].view(-1, D)[others])


@pytest.mark.parametrize(
    "case,stored",
    [
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"softcap": 5.0}, False),
        ({"bias": True}, False),
        ({"precision": "input"}, False),
        ({"batch_invariant": True}, False),
        ({"config": {"entropy_coef": 0.1}}, False),
        ({"schedule": "two_pass"}, False),
        ({"frozen": True}, True),
        ({"sequences": 12}, True),  # more than four times the hidden size
        ({"max_workspace_bytes": 16 * V * 2, "schedule": "one_pass"}, True),
        ({"activation_bytes": 0}, True),
    ],
    ids=str,
)
def test_where_they_are_not_kept(
    case: dict, stored: bool, backend: str, device: torch.device
) -> None:
    case = dict(case)
    problem = make_problem(case.pop("sequences", 5), 20, D, V)
    posed = problem.to(device, case.pop("dtype", torch.bfloat16))
    posed.weight.requires_grad_(not case.pop("frozen", False))
    if case.pop("bias", False):
        case["bias"] = posed.bias
    config = make_config("dapo", **case.pop("config", {}))
    plan = plan_of(posed, config, backend, **case)
    assert not plan.keeps
    assert plan.route.exponentials == (stored and plan.schedule == "one_pass")


def test_they_are_kept_where_they_fit(backend: str, device: torch.device) -> None:
    posed = make_problem(5, 20, D, V, bias=False).to(device, torch.bfloat16)
    config, tokens = make_config("dapo"), int(posed.mask.sum())
    size = -(-tokens // 16) * 16 * V * 2
    for name in ("max_workspace_bytes", "activation_bytes"):
        assert plan_of(posed, config, backend, **{name: size}).keeps
        assert not plan_of(posed, config, backend, **{name: size - 1}).keeps


def test_rows_without_a_gradient_are_left_out(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows move into gaps, and both gradients and a second backward are those of all rows."""
    monkeypatch.setattr(compaction, "_MULTIPLE", 8)
    monkeypatch.setattr(compaction, "_BLOCK", 3)
    multiplied: list[int] = []
    add = GradientSums.add

    def counted(self: GradientSums, gradient: TileGradient, *arguments: Any, **named: Any) -> None:
        multiplied.append(len(gradient.dlogits))
        add(self, gradient, *arguments, **named)

    monkeypatch.setattr(GradientSums, "add", counted)
    problem, config = make_problem(5, 20, D, V, bias=False), make_config("dapo")
    # every other sequence moved far in the direction of its advantage: the loss clips it
    old = problem.logprobs["old_logprobs"]
    old[::2] -= torch.sign(problem.advantages[::2, None])
    posed = problem.to(device, torch.bfloat16)
    monkeypatch.setattr(Plan, "leaves_out", True)
    exact, eager = (run(x, config, backend="reference") for x in (problem, posed))
    ours = run(posed, config, backend=backend)
    assert_all_as_exact_as(ours, eager, exact, 1.2e-2)
    tokens = int(posed.mask.sum())
    assert multiplied and multiplied[0] % 8 == 0 and multiplied[0] < 0.8 * tokens
    out = linear_policy_loss(posed.hidden, posed.weight, posed.batch(), config, backend=backend)
    inputs = (posed.hidden, posed.weight)
    none = torch.autograd.grad(out.loss * 0.0, inputs, retain_graph=True)
    assert not any(x.any() for x in none)
    first = torch.autograd.grad(out.loss, inputs, retain_graph=True)
    second = torch.autograd.grad(out.loss, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 1.0])
def test_moving_rows(
    share: float, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_MULTIPLE", 16)
    monkeypatch.setattr(compaction, "_BLOCK", 7)
    values = torch.arange(200.0, device=device)[:, None].repeat(1, 3)
    wanted = torch.rand(200, device=device) >= share
    wanted[:60] = share < 1  # so that gaps and rows to move are not spread evenly
    before = values.clone()
    order = compaction.moved_forward_(values, wanted)
    if order is None:
        assert (~wanted).sum() < 28 and torch.equal(values, before)
        return
    assert len(order) == -(-int(wanted.sum()) // 16) * 16
    assert torch.equal(values[: len(order)], before[order])
    assert torch.equal(values[wanted], before[wanted])
    assert set(order.tolist()) >= set(wanted.nonzero()[:, 0].tolist())
    again = compaction.moved_forward_(values, wanted)
    assert again is not None and torch.equal(again, order)
    assert torch.equal(values[: len(order)], before[order])
