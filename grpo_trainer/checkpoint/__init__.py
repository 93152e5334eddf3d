"""Checkpoints that are whole, and runs that are resumed to the bit."""

from grpo_trainer.checkpoint.files import CheckpointError, StartError
from grpo_trainer.checkpoint.resumable import ResumableTrainer
from grpo_trainer.checkpoint.resuming import find_checkpoint
