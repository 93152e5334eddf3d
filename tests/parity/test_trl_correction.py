"""Rollout correction: bounds, NaN, tool masks, and the ``sampling/*`` metrics of generation."""

from __future__ import annotations

import pytest

from grpo_kernels import LossConfig, Metrics, linear_policy_loss
from tests.parity.canned import make_rollouts
from tests.parity.compare import (
    assert_all_parity,
    assert_metrics,
    assert_parity,
    config,
    hidden_states,
    token_batch,
)
from tests.parity.test_trl_losses import MODES
from tests.parity.trl_driver import Trl

pytestmark = pytest.mark.slow

BOUNDS = {"max": (None, 1.3), "min": (0.75, None), "both": (0.75, 1.3)}
ROLLOUTS = {
    "tools_and_unknown": make_rollouts(),
    "tools": make_rollouts(unknown=False),
    "unknown": make_rollouts(env_mask=False),
    "plain": make_rollouts(seed=5, env_mask=False, unknown=False),
}


def corrected(
    mode: str | None, bounds: str, loss_type: str = "grpo", **fields: object
) -> LossConfig:
    low, high = BOUNDS[bounds]
    return config(
        loss_type=loss_type,
        rollout_correction_mode=mode,
        rollout_correction_min=low,
        rollout_correction_max=high,
        **fields,
    )


@pytest.mark.parametrize("rollouts", ROLLOUTS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_correction_and_its_metrics(trl: Trl, mode: str, bounds: str, rollouts: str) -> None:
    trl.rollouts = ROLLOUTS[rollouts]
    loss = corrected(mode, bounds)
    generated, logged = trl.generate(loss)
    parts = []
    for inputs in trl.split(generated):
        assert_parity(trl, inputs, loss)
        hidden, weight = hidden_states(trl, inputs).detach(), trl.model.lm_head.weight
        batch = token_batch(trl, inputs)
        parts.append(linear_policy_loss(hidden, weight, batch, loss).metrics)
    # TRL logs these once, for the generation batch
    sampling = {name: value for name, value in logged.items() if name.startswith("sampling/")}
    assert len(sampling) == 5
    assert_metrics("merged", Metrics.merge(parts), sampling)


@pytest.mark.parametrize("mode", (None, "token_truncate", "token_mask"))
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("rollouts", ROLLOUTS)
def test_vespo_folds_the_correction_into_its_weight(
    trl: Trl, mode: str | None, bounds: str, rollouts: str
) -> None:
    trl.rollouts = ROLLOUTS[rollouts]
    assert_all_parity(trl, corrected(mode, bounds, "vespo", beta=0.1))


@pytest.mark.parametrize("mode", ("sequence_truncate", "sequence_mask"))
def test_both_refuse_vespo_with_a_sequence_correction(trl: Trl, mode: str) -> None:
    loss = corrected(mode, "both", "vespo")
    generated, _ = trl.generate(loss)
    inputs = trl.split(generated)[0]
    hidden, weight = hidden_states(trl, inputs).detach(), trl.model.lm_head.weight
    with pytest.raises(ValueError, match="rollout_correction_mode: vespo"):
        linear_policy_loss(hidden, weight, token_batch(trl, inputs), loss)
    with pytest.raises(ValueError, match="VESPO loss requires"):
        trl.build_again(loss_type="vespo", use_vllm=True, vllm_importance_sampling_mode=mode)
