"""GRPOConfig, its checks, and the user's code that is named by import paths."""

from grpo_trainer.config.checks import NEWER_NAMES
from grpo_trainer.config.fields import AGGREGATIONS, SCALES, check_url, options
from grpo_trainer.config.grpo_config import (
    CHANGEABLE,
    OF_SAMPLING,
    GRPOConfig,
    Settings,
    check_arguments,
    import_path,
    pickled_without_secrets,
)
from grpo_trainer.config.loss import backward_options, loss_config
from grpo_trainer.config.optimizers import check_weight_decay, optimizer_of
