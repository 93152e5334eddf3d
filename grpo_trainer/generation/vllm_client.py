"""``from grpo_trainer.generation.vllm_client import VLLMClient``, as from TRL."""

from grpo_trainer.vllm import VLLMClient

__all__ = ["VLLMClient"]
