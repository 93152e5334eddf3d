"""GRPOConfig, its checks, and what the user names by an import path."""

from grpo_trainer.config.grpo_config import (
    AGGREGATIONS,
    PROMPT_FORMS,
    SCALES,
    GRPOConfig,
    check_arguments,
    import_path,
    pickled_without_secrets,
)
from grpo_trainer.config.loss import backward_options, loss_config
from grpo_trainer.config.rules import check_url, options
