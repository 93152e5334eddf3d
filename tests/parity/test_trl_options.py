"""The remaining options of TRL's losses, each alone and all at once."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.losses import LOSSES
from tests.parity.compare import assert_all_parity, assert_parity, config
from tests.parity.test_trl_losses import DTYPES, LEVELS, LOSS_TYPES, supported
from tests.parity.trl_driver import Trl

pytestmark = pytest.mark.slow

OPTIONS: dict[str, dict[str, object]] = {
    "plain_kl": dict(beta=0.1, use_bias_correction_kl=False),
    "epsilon_high": dict(epsilon=0.1, epsilon_high=1.02),
    "delta_below_clip": dict(delta=1.1, epsilon=0.3),
    "off_policy_mask": dict(off_policy_mask_threshold=0.01),
    "top_entropy": dict(top_entropy_quantile=0.45),
    "entropy_bonus": dict(entropy_coef=0.03),
    "entropy_bonus_on_top": dict(entropy_coef=0.03, top_entropy_quantile=0.45, beta=0.1),
    "all": dict(
        beta=0.1,
        delta=1.3,
        epsilon_high=1.02,
        off_policy_mask_threshold=0.01,
        top_entropy_quantile=0.6,
        entropy_coef=-0.02,
        rollout_correction_mode="token_truncate",
        rollout_correction_min=0.75,
        rollout_correction_max=1.3,
    ),
}
# of one loss only
PARAMETERS: dict[str, dict[str, object]] = {
    "sapo": dict(sapo_temperature_pos=0.6, sapo_temperature_neg=1.7),
    "vespo": dict(vespo_k_pos=1.5, vespo_lambda_pos=0.5, vespo_k_neg=1.0, vespo_lambda_neg=0.0),
    "dr_grpo": dict(max_completion_length=37),
    "clip": dict(loss_type="grpo", epsilon=0.02, epsilon_high=0.5),
}


LOSSES_AT_LEVELS = [
    (loss_type, level)
    for loss_type in LOSS_TYPES
    for level in LEVELS
    if supported(loss_type, level, None)
]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type,level", LOSSES_AT_LEVELS)
def test_option(trl: Trl, loss_type: str, level: str, option: str) -> None:
    # TRL ignores what a loss does not have; ours refuses it
    foreign = set(LOSSES["grpo"].settings) - set(LOSSES[loss_type].settings)
    options = {name: value for name, value in OPTIONS[option].items() if name not in foreign}
    loss = config(loss_type=loss_type, importance_sampling_level=level, **options)
    # fp64 separates a wrong formula from rounding; a gate decides alike in both
    assert_all_parity(trl, loss)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "fp64"))
def test_parameters_of_one_loss(
    trl_by_dtype: dict[torch.dtype, Trl], dtype: torch.dtype, name: str
) -> None:
    assert_all_parity(trl_by_dtype[dtype], config(**{"loss_type": name, **PARAMETERS[name]}))


def test_cispo_bound_below_one(trl: Trl) -> None:
    with pytest.warns(UserWarning, match="cispo uses epsilon_high"):
        loss = config(loss_type="cispo", epsilon_high=None)
    assert_all_parity(trl, loss)


@pytest.mark.parametrize("loss_type,level", LOSSES_AT_LEVELS)
def test_advantage_per_token(trl: Trl, loss_type: str, level: str) -> None:
    loss = config(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        off_policy_mask_threshold=0.01,
    )
    generated, _ = trl.generate(loss)
    inputs = trl.split(generated)[0]
    shape = inputs["completion_ids"].shape
    inputs["advantages"] = torch.randn(shape, dtype=torch.float64)
    # vespo's phi is one value per sequence in our metrics, TRL then averages over tokens
    assert_parity(trl, inputs, loss, metrics=("kl", "entropy") if loss_type == "vespo" else None)


@pytest.mark.parametrize("threshold", (None, 0.01))
@pytest.mark.parametrize("beta", (0.0, 0.1))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy(trl: Trl, loss_type: str, beta: float, threshold: float | None) -> None:
    """TRL keeps no old log-probabilities when a batch is used once: the ratio is 1."""
    loss = config(loss_type=loss_type, beta=beta, off_policy_mask_threshold=threshold)
    generated, _ = trl.generate(loss, on_policy=True)
    assert "old_per_token_logps" not in generated
    for inputs in trl.split(generated):
        assert_parity(trl, inputs, loss)


def test_off_policy_mask_without_rollout_logprobs(trl: Trl) -> None:
    loss = config(loss_type="grpo", off_policy_mask_threshold=0.01)
    generated, _ = trl.generate(loss)
    del generated["sampling_per_token_logps"]
    for inputs in trl.split(generated):
        assert_parity(trl, inputs, loss)
