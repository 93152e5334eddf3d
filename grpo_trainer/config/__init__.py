"""GRPOConfig, its checks, and what the user names by an import path. May know ``common``."""

from grpo_trainer.config.backward import backward_options
from grpo_trainer.config.checks import AGGREGATIONS, SCALES, options
from grpo_trainer.config.grpo_config import GRPOConfig, check_arguments, pickled_without_secrets
from grpo_trainer.config.imports import load_function, load_module
from grpo_trainer.config.loss import loss_config
from grpo_trainer.config.rollout import check_url
from grpo_trainer.config.tools import PROMPT_FORMS, import_path
