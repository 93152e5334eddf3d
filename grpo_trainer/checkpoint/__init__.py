"""Checkpoints: written completely, checked, and resumed exactly."""

from grpo_trainer.checkpoint.files import (
    SETTINGS_FILE,
    CheckpointError,
    StartError,
    delete_unfinished,
    model_aside,
    only_run,
    raised_together,
    rotate,
    written_aside,
)
from grpo_trainer.checkpoint.resuming import (
    check_checkpoint,
    ctrl_c_noted,
    find_checkpoint,
    settings_of,
    where_it_stopped,
)
