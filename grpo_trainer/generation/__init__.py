"""Where TRL has its client of a vLLM server; ours is in ``vllm``."""

from grpo_trainer.vllm import VLLMClient

__all__ = ["VLLMClient"]
