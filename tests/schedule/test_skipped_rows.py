"""Rows without a gradient: set aside before the forward or after it, measured or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    LossConfig,
    linear_policy_loss,
)
from grpo_kernels.testing import (
    Problem,
    make_config,
    make_problem,
    run,
)
from tests.support.host_reads import counted_reads

TILE = 53 * 4 * 8  # eight fp32 rows of the test vocabulary
SCHEDULES = ("one_pass", "two_pass")


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


# --- rows that have no gradient after the forward


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
