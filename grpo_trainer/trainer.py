"""GRPOTrainer: generate, score, compare within groups, and take fused policy-gradient steps."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from grpo_kernels import LossConfig, linear_logprobs, linear_policy_loss
from grpo_kernels.modeling import HeadFn, LMHead, add_fused_head
from grpo_trainer.completions import CompletionLog
from grpo_trainer.config import GRPOConfig, loss_config
from grpo_trainer.metrics import MetricLog, value_metric
from grpo_trainer.microbatch import MicroBatch
from grpo_trainer.experience import Collector
from grpo_trainer.policy import load_policy
from grpo_trainer.reference import frozen_reference
from grpo_trainer.rewards import resolve_rewards
from grpo_trainer.rewards.resolve import RewardSource
from grpo_trainer.rollout import RolloutEngine, TransformersEngine
from grpo_trainer.sampling import RepeatSampler
