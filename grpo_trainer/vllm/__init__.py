"""vLLM as an engine: a server of its own, or inside the trainer's processes."""

from grpo_trainer.vllm.client import VLLMClient
from grpo_trainer.vllm.http import NoServerError, ServerError
