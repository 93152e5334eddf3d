"""Where TRL has its client of a vLLM server; ours is in ``rollout``."""

from grpo_trainer.rollout import VLLMClient

__all__ = ["VLLMClient"]
