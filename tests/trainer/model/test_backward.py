"""The backward of the head that the configuration chooses: what it logs and what it changes."""

from __future__ import annotations

import copy

import pytest
import torch

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.monitor.metrics import MetricLog
from tests.support.trainer import CannedEngine, lengths_reward, parameters

NAMES = {f"backward_{name}" for name in ("entries", "whole_rows", "error", "error_bound")}
TOLERANCE = 1e-2


@pytest.fixture
def train(make_trainer, policy):
    """Train a copy of a policy with more columns than a row needs entries, on given completions."""
    policy.resize_token_embeddings(600, mean_resizing=False)
    with torch.no_grad():
        policy.lm_head.weight.mul_(40)  # peaked, as a policy that was trained

    def run(**changes):
        settings = {"max_steps": 2, "gradient_accumulation_steps": 2} | changes
        trainer = make_trainer(
            lengths_reward, model=copy.deepcopy(policy), **settings, engine=CannedEngine()
        )
        trainer.train()
        return [row for row in trainer.state.log_history if "reward" in row], trainer.model

    return run


@pytest.mark.parametrize("exact_weight", [False, True])
def test_a_tolerance(train, exact_weight):
    exact, expected = train()
    bounded = {"backward_tolerance": TOLERANCE, "backward_exact_weight": exact_weight}
    rows, model = train(**bounded)
    assert not NAMES & set().union(*exact)
    for row in rows:
        assert 0 < row["backward_error"] <= TOLERANCE and row["backward_error_bound"] > 0
        assert 1 < row["backward_entries"] < 300 and row["backward_whole_rows"] < 1
    # the first step's loss is that of the same weights; later ones have other gradients behind them
    assert rows[0]["loss"] != 0 and rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=2 * TOLERANCE)
    assert not torch.equal(parameters(model), parameters(expected))
    assert torch.equal(parameters(model), parameters(train(**bounded)[1]))  # a run is repeatable


def test_memory_to_keep(train):
    """It changes no gradient beyond rounding."""
    (rows, model), (_, expected) = train(activation_bytes=1 << 30), train()
    assert not NAMES & set().union(*rows)
    torch.testing.assert_close(parameters(model), parameters(expected), rtol=1e-4, atol=1e-5)


def test_errors_are_merged_over_processes():
    """By their squares, and where one process had no row with a gradient."""

    def part(error: float, norm: float, rows: int) -> Metrics:
        numbers = [torch.tensor(x, dtype=torch.float64) for x in (error**2, norm**2, 3 * rows)]
        entries = Stat("mean", numbers[2], torch.tensor(float(rows)).double())
        return Metrics({"error": Stat("norm_ratio", *numbers[:2]), "entries": entries})

    class Processes:
        device, num_processes = torch.device("cpu"), 3

        def gather(self, flat: torch.Tensor) -> torch.Tensor:
            logs = [flat, *torch.zeros(2, *flat.shape)]  # seconds of phases are last by name
            for log, others in zip(logs[1:], (part(4.0, 400.0, 5), part(0.0, 0.0, 0)), strict=True):
                stats = [stat for _, stat in sorted(others.stats.items())]
                log[0, :4] = torch.stack([x for stat in stats for x in (stat.total, stat.count)])
            return torch.cat(logs)

    log = MetricLog(Processes())
    log.add(part(2.0, 300.0, 2))
    log.add(part(1.0, 0.0, 1))
    merged = log.drain()
    assert merged["error"] == pytest.approx((21 / (300**2 + 400**2)) ** 0.5)
    assert merged["entries"] == 3
