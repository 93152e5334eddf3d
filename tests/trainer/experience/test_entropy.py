from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.experience import AdaptiveEntropy
from tests.support.trainer import CannedEngine, parameters


def noted(entropy: float, tokens: float) -> Metrics:
    total = torch.tensor(entropy * tokens, dtype=torch.float64)
    return Metrics({"entropy": Stat("mean", total, torch.tensor(tokens))})


@pytest.fixture
def controller(make_args):
    args = make_args(
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        entropy_coef_min=0.05,
        entropy_coef_max=0.13,
        entropy_coef_delta=0.02,
        entropy_target=1.0,
    )
    return AdaptiveEntropy(args, Accelerator(cpu=True))


def test_coefficient_follows_the_last_step(controller):
    # entropy of two micro-batches -> coefficient that is logged, and what applies then
    steps = [
        ((0.5, 0.7), 0.12, 0.12),
        ((0.5, 0.7), 0.13, 0.13),  # not above the maximum
        ((2.0, 0.4), 0.11, 0.0),  # 0.75 * 2.0 + 0.25 * 0.4 > 1
        ((2.0, 2.0), 0.09, 0.0),
        ((2.0, 2.0), 0.07, 0.0),
        ((2.0, 2.0), 0.05, 0.0),
        ((2.0, 2.0), 0.05, 0.0),  # not below the minimum
        ((1.0, 1.0), 0.07, 0.07),  # at the target
    ]
    assert controller.scale == 0  # nothing is known before the first step
    for (first, second), coef, scale in steps:
        controller.add(noted(first, 3))
        controller.add(noted(second, 1))
        assert controller.step()["entropy_coef"] == pytest.approx(coef)
        assert controller.scale == pytest.approx(scale)


def test_a_constant_coefficient_is_logged(make_trainer):
    trainer = make_trainer(entropy_coef=-0.25)
    trainer.train()
    assert [row["entropy_coef"] for row in trainer.state.log_history[:-1]] == [-0.25, -0.25]
    assert trainer.entropy_coef == -0.25


def after(make_trainer, policy, **changes) -> tuple[torch.Tensor, list[dict]]:
    settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    trainer = make_trainer(
        lambda completion_ids, **kwargs: [float(len(ids)) for ids in completion_ids],
        copy.deepcopy(policy),
        CannedEngine(),
        **(settings | changes),
    )
    trainer.train()
    return parameters(trainer.model), [row for row in trainer.state.log_history if "loss" in row]


def test_bonus_applies_from_the_second_step_on(make_trainer, policy):
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_target": 9.0}
    adaptive["entropy_coef_delta"] = 0.0
    first, logs = after(make_trainer, policy, max_steps=1, **adaptive)
    without, _ = after(make_trainer, policy, max_steps=1)
    torch.testing.assert_close(first, without)
    assert logs[0]["entropy_coef"] == pytest.approx(0.3)
    _, logs = after(make_trainer, policy, **adaptive)
    _, fixed_logs = after(make_trainer, policy, entropy_coef=0.3)
    assert logs[1]["entropy"] != pytest.approx(fixed_logs[1]["entropy"], abs=1e-6)
    bonus = logs[1]["policy_loss"] - logs[1]["loss"]
    assert bonus == pytest.approx(0.3 * logs[1]["entropy"], rel=1e-4)


def test_bonus_of_a_fixed_coefficient(make_trainer, policy):
    _, logs = after(make_trainer, policy, entropy_coef=0.3)
    for log in logs:
        bonus = log["policy_loss"] - log["loss"]
        assert bonus == pytest.approx(0.3 * log["entropy"], rel=1e-4)


def test_controller_watches_the_tokens_that_are_trained(make_trainer, policy):
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_coef_delta": 0.1}
    _, [log, _] = after(make_trainer, policy, top_entropy_quantile=0.3, entropy_target=9.0)
    middle = (log["entropy"] + log["entropy_top"]) / 2
    assert log["entropy"] < middle < log["entropy_top"]
    settings["entropy_target"] = middle
    _, [log, _] = after(make_trainer, policy, top_entropy_quantile=0.3, **settings)
    assert log["entropy_coef"] == pytest.approx(0.2)
    _, [log, _] = after(make_trainer, policy, **settings)
    assert log["entropy_coef"] == pytest.approx(0.4)


def test_off_policy_mask_drops_what_drifted(make_trainer, policy):
    drift = {"num_iterations": 2, "learning_rate": 0.05}
    plain, _ = after(make_trainer, policy, **drift)
    loose, _ = after(make_trainer, policy, off_policy_mask_threshold=1e6, **drift)
    tight, _ = after(make_trainer, policy, off_policy_mask_threshold=1e-9, **drift)
    torch.testing.assert_close(loose, plain)
    assert not torch.allclose(tight, plain)
