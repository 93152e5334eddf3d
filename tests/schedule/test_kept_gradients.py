"""One pass that keeps the gradients of all logits, in place of an fp32 sum of the weight's."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import explain
from grpo_kernels.backends import choice
from grpo_kernels.schedule import loss_plan
from grpo_kernels.testing import assert_all_as_exact_as, make_config, make_problem, run
from tests.support.targets import targets

V, D = 300, 32
# the backend whose kernel reads logits once
TRITON = [target for target in targets("cpu", "chunked") if target.values[0] == "triton"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a default tile of 16 rows, and blocks of 8."""
    monkeypatch.setattr(choice, "_CPU_WORKSPACE_BYTES", 16 * V * 4)
    monkeypatch.setattr(choice, "gpu_chunk_rows", lambda dtype, columns: 16)
    monkeypatch.setitem(loss_plan._FEWEST_CHUNK_ROWS, "cuda", 16)
    monkeypatch.setitem(loss_plan._FEWEST_CHUNK_ROWS, "cpu", 16)
    monkeypatch.setattr(loss_plan, "_BLOCK_ROWS", 16)
    monkeypatch.setattr(loss_plan, "FORMED_ROWS", 8)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "logit_scale": 1.5}])
@pytest.mark.parametrize("backend,device", TRITON)
def test_values_and_gradients(
    name: str, transform: dict, backend: str, device: torch.device
) -> None:
    problem = make_problem(5, 20, D, V)
    config = make_config(name, beta=0.05, temperature=0.7)
    posed = problem.to(device, torch.bfloat16)
    tokens = int(problem.mask.sum())
    assert 16 < tokens <= 2 * D, tokens
    plan = explain(
        posed.hidden,
        posed.weight,
        posed.batch(),
        config,
        bias=posed.bias,
        backend=backend,
        **transform,
    )
    assert plan.schedule == "one_pass" and len(plan.chunks) == 1 and plan.reads_once
    assert f"gradients of {tokens} rows, logits of 8 at a time" in str(plan)
    assert plan.workspace_bytes == tokens * V * 2 + 8 * V * 4
    exact = run(problem, config, backend="reference", **transform)
    eager = run(posed, config, backend="reference", **transform)
    assert_all_as_exact_as(run(posed, config, backend=backend, **transform), eager, exact, 1.2e-2)


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": torch.float32},
        {"sequences": 12},  # more rows than the sum of the weight's gradient has room for
        {"sequences": 1},  # one chunk in any case
        {"max_workspace_bytes": 16 * V * 4},
        {"batch_invariant": True},
        {"config": {"entropy_coef": 0.1}},
        {"frozen": True},
    ],
)
@pytest.mark.parametrize("backend,device", TRITON)
def test_where_they_are_not_kept(case: dict, backend: str, device: torch.device) -> None:
    case = dict(case)
    problem = make_problem(case.pop("sequences", 5), 20, D, V)
    posed = problem.to(device, case.pop("dtype", torch.bfloat16))
    posed.weight.requires_grad_(not case.pop("frozen", False))
    config = make_config("dapo", **case.pop("config", {}))
    plan = explain(posed.hidden, posed.weight, posed.batch(), config, backend=backend, **case)
    assert "at a time" not in str(plan)
