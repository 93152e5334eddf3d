"""Helpers that tests import by name."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
)

from grpo_trainer import GRPOConfig, VLLMClient
from grpo_trainer.engines import Completions, Sampler, policy_weights
from grpo_trainer.vllm import ServerError
from tests.support.launch import end, environment, free_port
from tests.support.trainer import mask_ids

# a small and quick engine; on a CPU blocks hold 32 tokens and heads have a multiple of 32 channels
ENGINE = {
    "enforce_eager": True,
    "max_num_seqs": 16,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}
START = 600.0  # seconds that a server may take
CLOSE = 1e-3  # nats between engine and policy, in fp32
CLOSE_IN_BF16 = 0.03  # of an adapter that the policy computes in bf16
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 13] * 7]  # one of them fills a block of the prefix cache
GROUPS = [prompt for prompt in PROMPTS for _ in range(4)]
LORA = {"r": 4, "lora_alpha": 7, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TAKES_LORA = {"--enable-lora": "", "--max-lora-rank": 8}  # arguments of a server
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)


def make_config(folder: str, **changes) -> GRPOConfig:
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "use_vllm": True,
    }
    if "vllm_server_port" in changes:
        settings |= {"vllm_mode": "server", "vllm_server_timeout": START}
    else:
        settings |= {"vllm_engine_kwargs": ENGINE, "vllm_gpu_memory_utilization": 0.1}
    return GRPOConfig(**(settings | changes))


def make_model(tokenizer: PreTrainedTokenizerBase, tied: bool, seed: int = 0) -> Qwen3ForCausalLM:
    """Return two layers, with weights so large that no two of its distributions are alike."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).eval()


def quantized(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4)


def dequantized(layer: Linear4bit) -> torch.Tensor:
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def layers_in_4_bits(folder: str) -> list[tuple[str, Linear4bit]]:
    modules = quantized(folder).named_modules()
    return [(name, layer) for name, layer in modules if isinstance(layer, Linear4bit)]


def adapted(model: PreTrainedModel, **changes: Any) -> torch.nn.Module:
    """Return ``model`` under an adapter that alters what it says."""
    torch.manual_seed(11)
    policy = get_peft_model(model, LoraConfig(**(LORA | copy.deepcopy(changes)))).eval()
    change(policy)
    return policy


def bytes_of(policy: torch.nn.Module, adapter: bool) -> int:
    """Return the bytes of the factors, or else of the merged checkpoint."""
    if not adapter:
        return sum(value.nbytes for _, value in policy_weights(policy))
    return sum(value.nbytes for value in policy.parameters() if value.requires_grad)


def change(model: torch.nn.Module) -> None:
    """Change all weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def difference(
    model: torch.nn.Module,
    prompts: list[list[int]],
    found: Completions,
    temperature: float = 1.0,
    never: Iterable[int] = (),
    seen: Callable[[int, int], dict[str, Any]] = lambda prompt, length: {},
    **filters,
) -> float:
    """Return the largest difference between log-probabilities of ``found`` and the model's.

    Those are over the ids of the sampling mask, where there is one. Raises AssertionError where
    these are not what ``filters`` leave.

    Args:
        never: ids that are not drawn.
        seen: what else the model is given for a prompt and its completion, of such a length.
    """
    assert found.logprobs is not None
    largest = 0.0
    for index, (prompt, ids) in enumerate(zip(prompts, found.token_ids, strict=True)):
        whole = torch.tensor([prompt + ids], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=whole, **seen(index, whole.shape[1])).logits[0]
        rows = logits.double().cpu()[len(prompt) - 1 : -1] / temperature
        rows[:, list(never)] = -torch.inf
        for at, (row, token) in enumerate(zip(rows, ids, strict=True)):
            over = row
            if found.sampling_mask is not None:
                left = found.sampling_mask[index][at]
                assert token in left and set(left) == mask_ids(row, **filters)
                over = row[left]
            expected = float(row[token] - over.logsumexp(0))
            largest = max(largest, abs(expected - found.logprobs[index][at]))
    return largest


def apart(sampler: Sampler, policy: torch.nn.Module) -> float:
    return difference(policy, GROUPS, sampler.generate(GROUPS))


def worst_mismatch(trainer: Trainer, steps: int) -> float:
    """Return the largest difference between engine and policy that ``steps`` steps have logged."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == steps
    return max(row["sampling/sampling_logp_difference/max"] for row in rows)


class Server:
    """``grpo-train serve`` of a model in a folder, as small and quick as can be."""

    def __init__(self, folder: Path, more: Mapping[str, Any]) -> None:
        self.port = free_port()
        self._log = folder / "log.txt"
        options = {
            "--model": folder / "model",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": 128,
            "--gpu-memory-utilization": 0.1,
            **{f"--{name.replace('_', '-')}": value for name, value in ENGINE.items()},
        }
        del options["--enforce-eager"]
        words = [str(word) for pair in (options | more).items() for word in pair if word != ""]
        code = "from grpo_trainer.cli import main; main()"
        self._command = [sys.executable, "-c", code, "serve", "--enforce-eager", *words]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment(), stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        end(self._process)

    def connected(self) -> VLLMClient:
        """Return a client, once the server answers."""
        try:
            return VLLMClient(server_port=self.port, connection_timeout=START)
        except ServerError as error:
            raise AssertionError(self._log.read_text()[-5000:]) from error


@contextmanager
def serving(
    folder: Path,
    model: PreTrainedModel,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Server]:
    """Save a model to ``folder`` and let a server serve it, from when it answers; ``more`` are
    arguments of the server, flags with an empty value."""
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    server = Server(folder, more)
    try:
        server.connected().close()
        yield server
    finally:
        server.kill()
