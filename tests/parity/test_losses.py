"""Every loss of TRL, at every ratio level, under every option: loss, gradients and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from trl import GRPOConfig

from grpo_kernels.losses import LOSSES
from grpo_trainer.config.loss import OF_TRL
from tests.parity.compare import (
    ROLLOUTS,
    Case,
    assert_parity,
    loss_config,
    loss_mask,
)
from tests.parity.trl_driver import Trl

pytestmark = pytest.mark.slow

TRLS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
AT_LEVELS = [*itertools.product(TRLS, ("token", "sequence")), ("gspo", None)]
AT_LEVELS.remove(("vespo", "sequence"))  # is its own sequence ratio
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = {"max": (None, 1.3), "min": (0.75, None), "both": (0.75, 1.3)}


def correction(mode: str, bounds: str = "both") -> dict[str, object]:
    low, high = BOUNDS[bounds]
    return {
        "rollout_correction_mode": mode,
        "rollout_correction_min": low,
        "rollout_correction_max": high,
    }


TERMS = dict(beta=0.1, entropy_coef=0.03)
GATE = dict(off_policy_mask_threshold=0.01)
ALL = dict(
    beta=0.1, delta=1.3, epsilon_high=1.02, top_entropy_quantile=0.6, entropy_coef=-0.02,
    **GATE, **correction("token_truncate"),
)  # fmt: skip

# what a loss does not have TRL ignores: it goes without
OPTIONS = {
    "plain": Case(),
    "KL": Case(dict(beta=0.1)),
    "KL, plain": Case(dict(beta=0.1, use_bias_correction_kl=False)),
    "delta": Case(dict(delta=1.3)),
    "delta below clip": Case(dict(delta=1.1, epsilon=0.3)),
    "clip": Case(dict(epsilon=0.02, epsilon_high=0.5)),
    "epsilon_high": Case(dict(epsilon=0.1, epsilon_high=1.02)),
    "no lower bound": Case(dict(epsilon=10.0, epsilon_high=0.1)),  # DeepSeek-R1's epsilon
    "off-policy mask": Case(GATE),
    "off-policy mask, no rollout": Case(GATE, without="sampling_per_token_logps"),
    "top entropy": Case(dict(top_entropy_quantile=0.45)),
    "entropy bonus": Case(dict(entropy_coef=0.03)),
    "entropy bonus on top": Case(dict(**TERMS, top_entropy_quantile=0.45)),
    "temperatures": Case(dict(sapo_temperature_pos=0.6, sapo_temperature_neg=1.7)),
    "exponents": Case(
        dict(vespo_k_pos=1.5, vespo_lambda_pos=0.5, vespo_k_neg=1.0, vespo_lambda_neg=0.0)
    ),
    "longest": Case(dict(max_completion_length=37)),
    **{mode: Case(correction(mode)) for mode in MODES},
    "token_mask, KL and delta": Case(dict(beta=0.1, delta=1.3, **correction("token_mask"))),
    "sequence_truncate, KL and delta": Case(
        dict(beta=0.1, delta=1.3, **correction("sequence_truncate"))
    ),
    "all": Case(ALL),
    "plain, fp32": Case(dtype=torch.float32),
    "all, fp32": Case(ALL, dtype=torch.float32),
    "advantage per token": Case(dict(beta=0.1, **GATE), per_token=True),
}  # fmt: skip
# by what a loss is divided does not depend on its ratio
WINDOWS = {
    "on policy": Case(on_policy=True),
    "on policy, all": Case(dict(**TERMS, **GATE), on_policy=True),
    "evaluation": Case(TERMS, training=False, window=(4, 2)),
    "no accumulation": Case(TERMS, window=(1, 2)),
    "more accumulation": Case(TERMS, window=(4, 2)),
    "windows apart": Case(TERMS, window=(3, 5)),
    "processes": Case(processes=4),
    # few tokens shared by many steps: the normaliser is a fraction, not 1
    "less than one item": Case(num_items=1, window=(1, 4)),
}


def cases() -> Iterator[Any]:
    at_tokens = [(name, level) for name, level in AT_LEVELS if level == "token"]
    for (name, level), (option, case) in (
        *itertools.product(AT_LEVELS, OPTIONS.items()),
        *itertools.product(at_tokens, WINDOWS.items()),
    ):
        foreign = {*LOSSES["grpo"].settings, *LOSSES["sapo"].settings, *LOSSES["vespo"].settings}
        foreign -= set(LOSSES[name].settings)
        settings = {key: value for key, value in case.settings.items() if key not in foreign}
        refused = name == "vespo" and "sequence" in str(settings.get("rollout_correction_mode"))
        if refused or (case.settings and not settings):
            continue
        yield pytest.param(name, level, settings, case, id=f"{name}-{level or 'own'}-{option}")


def test_settings_that_trl_has_for_every_loss() -> None:
    of_losses = {name for loss in LOSSES.values() for name in loss.settings}
    assert of_losses & {item.name for item in fields(GRPOConfig)} == set(OF_TRL)


@pytest.mark.parametrize(("name", "level", "settings", "case"), cases())
def test_option(
    trls: dict[torch.dtype, Trl], name: str, level: str | None, settings: Any, case: Case
) -> None:
    # of cispo the bound itself; near enough to be reached
    own = {"epsilon_high": 1.15} if name == "cispo" else {}
    loss = loss_config(loss_type=name, importance_sampling_level=level, **own | settings)
    assert_parity(trls[case.dtype], loss, case)


@pytest.mark.parametrize("rollouts", ROLLOUTS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    ("name", "mode"),
    [*itertools.product(("grpo",), MODES), *itertools.product(("vespo",), MODES[:2])],
)
def test_correction(trl: Trl, name: str, mode: str, bounds: str, rollouts: str) -> None:
    """Bounds, NaN and tool masks; vespo folds the correction into its weight."""
    loss = loss_config(loss_type=name, beta=0.1, **correction(mode, bounds))
    assert_parity(trl, loss, Case(rollouts=rollouts))


@pytest.mark.parametrize("mode", MODES)
def test_the_inputs_reach_every_branch(trl: Trl, mode: str) -> None:
    """Guards the comparison: tokens clip on both sides, and weights lie in and outside bounds."""
    low, high = BOUNDS["both"]
    loss = loss_config(loss_type="grpo", delta=1.3, **correction(mode))
    parts, _ = Case().micro_batches(trl, loss)
    weights = torch.cat([inputs["importance_sampling_ratio"] for inputs in parts])
    for bound in (low, high) if mode.endswith("truncate") else (0.0,):
        assert bool((weights == bound).any())
    assert bool(((weights > low) & (weights < high) & (weights != 1)).any())
    for inputs in parts:
        _, logged = trl.loss(inputs, loss, training=True)
        assert 0 < logged["clip_ratio/low_mean"] < 0.5
        assert 0 < logged["clip_ratio/high_mean"] < 0.5
        assert loss_mask(inputs).sum(1).min() == 0  # a sequence without a valid token
        assert bool(inputs["sampling_per_token_logps"].isnan().any())
