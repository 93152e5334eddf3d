"""Helpers that tests import by name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM, Trainer

from grpo_trainer.rollout import Completions

ROOT = Path(__file__).parents[2]

# a small and quick engine; on a CPU blocks hold 32 tokens and heads have a multiple of 32 channels
ENGINE = {
    "enforce_eager": True,
    "max_num_seqs": 16,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}
CLOSE = 1e-3  # nats between engine and policy, in fp32
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 13] * 7]  # one of them fills a block of the prefix cache


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


def change(model: torch.nn.Module) -> None:
    """Change all weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def difference(
    model: torch.nn.Module,
    prompts: list[list[int]],
    token_ids: list[list[int]],
    logprobs: list[list[float]],
    temperature: float = 1.0,
) -> float:
    """Return the largest difference between these log-probabilities and the model's."""
    largest = 0.0
    for prompt, ids, values in zip(prompts, token_ids, logprobs, strict=True):
        with torch.no_grad():
            sequence = torch.tensor([prompt + ids], device=model.device)
            logits = model(input_ids=sequence).logits[0].float().cpu()
        table = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = table.gather(1, torch.tensor(ids)[:, None])[:, 0]
        largest = max(largest, (expected - torch.tensor(values)).abs().max().item())
    return largest


def differences_over_mask(
    model: torch.nn.Module, prompts: list[list[int]], found: Completions, **filters
) -> float:
    """Return the largest difference of log-probabilities over the ids of the sampling mask.

    Raises AssertionError where those are not what ``filters`` leave.
    """
    largest = 0.0
    for prompt, ids, values, kept in zip(prompts, *found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids], device=model.device)).logits[0]
        rows = logits.double().cpu()[len(prompt) - 1 : -1]
        for row, token, value, left in zip(rows, ids, values, kept, strict=True):
            assert token in left and set(left) == mask_ids(row, **filters)
            over_left = row[token] - row[left].logsumexp(0)
            largest = max(largest, abs(float(over_left) - value))
    return largest


def mask_ids(logits: torch.Tensor, top_k: int, top_p: float = 1.0) -> set[int]:
    """Return the ids that sampling may draw for one token, by the definitions of the filters."""
    p = logits.softmax(-1)
    order = p.argsort(descending=True)[:top_k].tolist()
    chosen = p[order] / p[order].sum()
    before = (chosen.cumsum(0) - chosen).tolist()
    return {i for i, mass in zip(order, before, strict=True) if mass < top_p}


def worst_mismatch(trainer: Trainer, steps: int) -> float:
    """Return the largest difference between engine and policy that ``steps`` steps have logged."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == steps
    return max(row["sampling/sampling_logp_difference/max"] for row in rows)


class Server:
    """``grpo-train serve`` in a process group of its own, as small and quick as can be."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self.port = port
        self._log = log
        options = {
            "--model": model,
            "--port": port,
            "--dtype": "float32",
            "--max-model-len": 128,
            "--gpu-memory-utilization": 0.1,
            **{f"--{name.replace('_', '-')}": value for name, value in ENGINE.items()},
        }
        del options["--enforce-eager"]
        words = [str(word) for pair in options.items() for word in pair]
        code = "from grpo_trainer.cli import main; main()"
        self._command = [sys.executable, "-c", code, "serve", "--enforce-eager", *words]
        self.start()

    def start(self) -> None:
        path = os.pathsep.join([str(ROOT), *sys.path])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def said(self) -> str:
        return self._log.read_text()[-5000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
