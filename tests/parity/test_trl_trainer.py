"""Ten steps of TRL's GRPOTrainer and of ours log the same numbers, each loss with KL and without.

Model, data, seed and completions are the same; every name that TRL logs is compared. A table in
docs/trainer.md says what differs on purpose.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, Qwen2ForCausalLM

from tests.parity.canned import tiny_model
from tests.parity.scripted import STEPS, our_logs, trl_logs

pytestmark = pytest.mark.slow

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "cispo": {"epsilon_high": 1.15},
    "sapo": {"epsilon": 0.2},  # its default: these have none
    "vespo": {"epsilon": 0.2},
}
WINDOW = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "windows": {**WINDOW, "loss_type": "grpo", "scale_rewards": "batch"},
    "synced reference, rewards normalised apart": {
        "sync_ref_model": True, "ref_model_sync_steps": 3,
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "adaptive entropy": {
        "entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 4.3,
        "entropy_coef_delta": 0.01, "top_entropy_quantile": 0.5,
    },
}  # fmt: skip
NEVER_ALIKE = {"step_time"}
OVER_A_WINDOW = {
    "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
    "clip_ratio/high_max", "clip_ratio/region_mean",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)  # TRL loads its reference model from there
    return Qwen2ForCausalLM.from_pretrained(folder, dtype="float32")


def assert_same_logs(
    model: PreTrainedModel, folder: Path, apart: set[str] = NEVER_ALIKE, **settings: Any
) -> list[dict[str, float]]:
    theirs = trl_logs(model, folder / "trl", **settings)
    ours = our_logs(model, folder / "ours", **settings)
    assert len(theirs) == len(ours) == STEPS
    for expected, got in zip(theirs, ours, strict=True):
        for name in expected.keys() - apart:
            assert name in got, f"step {expected['step']}: no {name}"
            close = math.isclose(got[name], expected[name], rel_tol=1e-4, abs_tol=1e-5)
            both = f"{got[name]}, TRL logged {expected[name]}"
            assert close, f"step {expected['step']}: {name} is {both}"
    return ours


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_losses(model: PreTrainedModel, tmp_path: Path, loss_type: str, beta: float) -> None:
    logs = assert_same_logs(model, tmp_path, loss_type=loss_type, beta=beta, **LOSSES[loss_type])
    assert {"loss", "grad_norm", "reward", "rewards/lengths/mean", "entropy"} <= set(logs[0])
    assert any("clip" in name or "vespo" in name or loss_type == "sapo" for name in logs[0])
    assert ("kl" in logs[0]) == (beta > 0)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(model: PreTrainedModel, tmp_path: Path, option: str) -> None:
    settings = {"beta": 0.1} | OPTIONS[option]
    apart = NEVER_ALIKE | (OVER_A_WINDOW if "steps_per_generation" in settings else set())
    assert_same_logs(model, tmp_path, apart, **settings)


def test_adapter(model: PreTrainedModel, tmp_path: Path) -> None:
    """The reference is the model without its adapter in both."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    assert_same_logs(model, tmp_path, beta=0.1, peft_config=lora)
