"""Checkpoints that are whole, and runs that are resumed to the bit.

May know ``common``, ``config``, ``data`` and ``monitor``.
"""

from grpo_trainer.checkpoint.files import CheckpointError
from grpo_trainer.checkpoint.loaders import GroupTrainer
from grpo_trainer.checkpoint.resuming import find_checkpoint
from grpo_trainer.checkpoint.run_lock import StartError
from grpo_trainer.checkpoint.run_settings import settings_of
