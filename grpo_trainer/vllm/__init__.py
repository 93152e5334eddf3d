"""vLLM as an engine: a separate server, or inside the trainer's processes."""

from grpo_trainer.vllm.client import VLLMClient
from grpo_trainer.vllm.http import NoServerError, ServerError
