"""GRPOConfig, its checks, and what the user names by an import path."""

from grpo_trainer.config.checks import AGGREGATIONS, SCALES, options
from grpo_trainer.config.engines import check_url
from grpo_trainer.config.grpo_config import GRPOConfig, check_arguments, pickled_without_secrets
from grpo_trainer.config.loss import backward_options, loss_config
from grpo_trainer.config.tools import PROMPT_FORMS, import_path
