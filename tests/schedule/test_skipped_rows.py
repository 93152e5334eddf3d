"""Rows without a gradient: set aside before the forward or after it, measured or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels import (
    LossConfig,
    explain,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.backends import StatsGradients
from grpo_kernels.engine import gradients, recompute
from grpo_kernels.engine.rows import move_rows_, surviving_rows
from grpo_kernels.testing import (
    Problem,
    make_config,
    make_problem,
    run,
)
from tests.support.host_reads import counted_reads

TILE = 53 * 4 * 8  # eight fp32 rows of the test vocabulary
SCHEDULES = ("one_pass", "two_pass")
# old log-probabilities lie 0.2 nats around the policy's: about half of the tokens are clipped
CLIPPED = dict(epsilon=0.01, rollout_correction_mode="token_mask", rollout_correction_max=1.1)


def half_zero(problem: Problem) -> Tensor:
    advantages = problem.advantages.clone()
    advantages[::2] = 0
    return advantages


# --- host reads in a step


def step(problem: Problem, config: LossConfig, counts: dict, **options: Any) -> None:
    batch = problem.batch(
        advantages=half_zero(problem),
        ref_logprobs=None,
        rollout_logprobs=None,
        num_items_in_batch=17.0,
        **counts,
    )
    linear_policy_loss(problem.hidden, problem.weight, batch, config, **options).loss.backward()


def true_counts(problem: Problem) -> dict[str, list[int]]:
    active = problem.mask & (half_zero(problem) != 0)[:, None]
    return {"lengths": problem.mask.sum(1).tolist(), "active_lengths": active.sum(1).tolist()}


@pytest.mark.parametrize("name", ("dapo", "gspo", "vespo"))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("metrics", ("all", "active"))
@pytest.mark.parametrize("given", (False, True))
def test_a_step_reads_values_once_and_never_with_counts(
    monkeypatch: pytest.MonkeyPatch, name: str, schedule: str, metrics: str, given: bool
) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    counts = true_counts(problem) if given else {}
    options = dict(schedule=schedule, metric_rows=metrics, max_workspace_bytes=TILE)
    with counted_reads(monkeypatch) as reads:
        step(problem, make_config(name), counts, **options)
    assert reads == ([] if given else ["cpu"])


def test_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(3.0)
    with counted_reads(monkeypatch) as reads:
        float(x[0]), x.tolist(), x[x > 1], x.cpu(), bool(x[1]), x.nonzero()
        torch.repeat_interleave(torch.tensor([1, 2]))
    assert len(reads) == 8, reads
    problem = make_problem().to("cpu", torch.float32)
    with counted_reads(monkeypatch) as reads:  # inside the op, and inside its backward
        found = linear_logprobs(problem.hidden, problem.weight, problem.target)
        found.logprobs.sum().backward()
    assert reads == ["cpu", "cpu"]


@pytest.mark.parametrize("name", ("dapo", "gspo"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_given_counts_change_nothing(name: str, schedule: str) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    fetched = problem.batch(advantages=half_zero(problem))
    told = problem.batch(advantages=half_zero(problem), **true_counts(problem))
    assert (told.lengths, told.active_lengths) == (fetched.lengths, fetched.active_lengths)
    expected = run(problem, make_config(name), fetched, schedule=schedule)
    got = run(problem, make_config(name), told, schedule=schedule)
    for key, value in expected.items():
        assert torch.equal(got[key], value) or value.isnan().all(), key
    without = problem.batch(advantages=half_zero(problem), lengths=true_counts(problem)["lengths"])
    assert run(problem, make_config(name), without)["frac_rows_skipped"] < got["frac_rows_skipped"]


# --- rows that have no gradient after the forward


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_see_the_rows_with_a_gradient(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    problem, seen = make_problem(7, 6).to("cpu", torch.float32), []
    plain = gradients.accumulate

    def accumulate(out: Tensor, a: Tensor, b: Tensor, *args: object, **kwargs: object) -> object:
        if a.shape[0] == 53:  # dlogits.T @ rows
            seen.append(b.shape[0])
        return plain(out, a, b, *args, **kwargs)

    for module in (gradients, recompute):
        monkeypatch.setattr(module, "accumulate", accumulate)
    got = run(problem, make_config("dapo", **CLIPPED), schedule=schedule)
    alive = int(got["dhidden"].flatten(0, 1).any(1).sum())
    assert alive < problem.mask.sum() and set(seen) == {alive}
    seen.clear()
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    run(problem, make_config("dapo", **CLIPPED), schedule=schedule)
    assert set(seen) == {int(problem.mask.sum())}


@pytest.mark.parametrize("wanted", ("1111", "0000", "1010", "0011", "1101", "0", "1"))
def test_surviving_rows_fill_the_gaps(wanted: str) -> None:
    mask = torch.tensor([x == "1" for x in wanted])
    order = surviving_rows(mask)
    if mask.all():
        assert order is None
        return
    assert sorted(order) == mask.nonzero().flatten().tolist()
    assert all(row >= mask.sum() for place, row in enumerate(order) if place != row)
    tile = torch.arange(mask.numel() * 3).reshape(-1, 3)
    expected = tile[order]
    assert torch.equal(move_rows_(tile, order), expected)


def test_few_zero_rows_stay() -> None:
    mask = torch.arange(64) >= 3
    assert surviving_rows(mask) is None
    mask[3] = False
    assert surviving_rows(mask) is not None


def test_gradients_that_are_nan_are_not_dropped() -> None:
    nothing = StatsGradients(torch.tensor([0.0, float("nan")]), None, torch.zeros(2))
    assert nothing.nonzero.tolist() == [False, True]
    assert StatsGradients(None).nonzero is None


def test_explain_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(4, 6).to("cpu", torch.float32)
    batch = problem.batch(advantages=half_zero(problem))
    waiting = int(problem.mask[::2].sum())
    arguments = (problem.hidden, problem.weight, batch, make_config("dapo"))
    text = str(explain(*arguments))
    assert f"rows of zero advantage: {waiting} take the forward only, for the metrics" in text
    assert "rows that the loss clips or gates: left out of the GEMMs of their gradients" in text
    assert "rows of zero advantage: not computed" in str(explain(*arguments, metric_rows="active"))
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    assert "the host would have to wait for the device" in str(explain(*arguments))
