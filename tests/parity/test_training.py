"""Ten steps of TRL's GRPOTrainer and of ours: the same logs, and the same weights.

Model, data, seed and completions are the same; every name that TRL logs is compared. A table in
docs/trainer.md says what differs on purpose.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import PreTrainedModel, Qwen2ForCausalLM, Trainer, TrainingArguments

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.parity.canned import tiny_model, tiny_tokenizer
from tests.parity.test_losses import OPTIONS
from tests.parity.trl_driver import TRL_NAMES
from tests.support.trainer import CannedEngine, lengths_reward, parameters

pytestmark = pytest.mark.slow

STEPS = 10
PROMPTS = ["w5 w6", "w9", "w40 w3 w8", "w77 w12", "w101", "w6 w6 w150", "w33", "w2 w190"]
SETTINGS: dict[str, Any] = dict(
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    max_steps=STEPS,
    logging_steps=1,
    per_device_train_batch_size=8,
    num_generations=4,
    num_iterations=2,  # the second step of each generation is off-policy, so ratios clip
    max_completion_length=4,
    mask_truncated_completions=True,
    temperature=0.8,
    shuffle_dataset=False,
    beta=0.1,
    # a step is a multiple of the gradient: what differs between the two is not amplified
    optim="sgd",
    learning_rate=0.2,
)
CLIPS = {"epsilon": 0.02}
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", **CLIPS},
    "bnpo": {"loss_type": "bnpo", **CLIPS},
    "dr_grpo": {"loss_type": "dr_grpo", **CLIPS},
    "dapo": {"loss_type": "dapo", **CLIPS, "epsilon_high": 0.03, "delta": 1.2},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", **CLIPS},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.15},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.6, "sapo_temperature_neg": 1.7},
    "vespo": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 0.5, "vespo_k_neg": 1.0,
        "vespo_lambda_neg": 0.1,
    },
    "no KL": {"beta": 0.0, **CLIPS},
    "KL as it is": {"use_bias_correction_kl": False},
    "off-policy mask": {"off_policy_mask_threshold": 1e-4},
    "windows": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "grpo",
        "scale_rewards": "batch", "pad_to_multiple_of": 8, **CLIPS,
    },
    "generation batch by its size": {"generation_batch_size": 16, "num_iterations": 1},
    "rewards as they are": {
        "scale_rewards": "none", "reward_weights": [0.5, 2.0], "mask_truncated_completions": False,
    },
    "rewards normalised apart": {
        "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.5, 2.0],
    },
    "synced reference": {
        "sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.3,
    },
    "entropy": {"entropy_coef": -0.01, "top_entropy_quantile": 0.5},
    "adaptive entropy": {
        "entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 4.3,
        "entropy_coef_delta": 0.01, "entropy_coef_min": 0.005, "entropy_coef_max": 0.025,
        "top_entropy_quantile": 0.5,
    },
    "adapter": {"peft_config": True},  # the reference is the model without it
}  # fmt: skip
NEVER_ALIKE = {"step_time"}
OVER_A_WINDOW = {
    "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
    "clip_ratio/high_max", "clip_ratio/region_mean",
}  # fmt: skip
