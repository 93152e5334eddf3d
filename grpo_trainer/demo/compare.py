"""Losses and gradients at a bf16 head: ours, full logits, TRL's and Liger's, against fp64.

``python -m grpo_trainer.demo.compare NAME`` prints the peak bytes of one of them.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.losses import policy_loss
from grpo_kernels.testing import relative_error
from grpo_kernels.tools import installed_version

# T tokens, width D, V vocabulary entries
TOKENS, WIDTH, VOCABULARY = 256, 256, 32768
SPREAD = 4.0  # standard deviation of the logits: large enough for bf16 to round them visibly
SEQUENCES = 4
ROUNDS = 3
CONFIG = LossConfig()  # dapo without a reference
EXACT = "reference"  # the backend that forms all logits, here in fp64
_TOLERANCE = 0.1  # of loss and gradients, relative

# ((B, L, D) hidden states, (V, D) weight, the batch) -> () loss
Loss = Callable[..., Tensor]


def _fused(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    config: LossConfig = CONFIG,
    backend: str = "auto",
) -> Tensor:
    return linear_policy_loss(hidden, weight, batch, config, backend=backend).loss


def _eager(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Tensor:
    logits = (hidden.flatten(0, 1) @ weight.T).float()
    logprobs = logits.log_softmax(-1).gather(-1, batch.target[:, None]).squeeze(-1)
    return policy_loss(logprobs, batch, CONFIG).loss


def _trl(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    # bias, target, temperature, columns of a chunk, softcap, scale, further outputs
    logprobs, *_ = ChunkedLogProbFunction.apply(
        hidden.flatten(0, 1), weight, None, batch.target, 1.0, COLUMNS, None, 1.0, ()
    )
    return policy_loss(logprobs, batch, CONFIG).loss


def _liger(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    target = batch.target.view(hidden.shape[:2])
    # compiled, it takes longer to be compiled than to run here
    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type="dapo", use_ref_model=False, compiled=False
    )
    advantages = batch.advantages.view_as(target)[:, 0]
    return loss_of(hidden, weight, target, torch.ones_like(target), advantages)[0]


_OTHERS = ("trl", "liger-kernel")  # by their distributions
HEADS: dict[str, Loss] = {
    "grpo-kernels": _fused,
    "full logits": _eager,
    "trl": _trl,
    "liger-kernel": _liger,
}


def installed_heads() -> list[str]:
    """Return the names of those that can run here."""
    return [name for name in HEADS if name not in _OTHERS or installed_version(name)]


def compare() -> list[dict[str, Any]]:
    """Measure each in turn, in interleaved rounds; ours is the first.

    Returns:
        Median seconds, peak bytes above the inputs, and the error of the gradients against fp64,
        over the largest entry.

    Raises:
        RuntimeError: a loss or its gradients are wrong.
    """
    hidden, weight, batch = _large_head()
    exact = _loss_and_gradients(_fused, hidden.double(), weight.double(), batch, CONFIG, EXACT)
    seconds: dict[str, list[float]] = {name: [] for name in installed_heads()}
    errors = {}
    for name in seconds:  # which also warms up
        found = _loss_and_gradients(HEADS[name], hidden, weight, batch)
        differences = list(map(relative_error, found, exact))
        if max(differences) > _TOLERANCE:
            raise RuntimeError(f"{name}: loss or gradients differ from fp64 by {differences}")
        errors[name] = max(differences[1:])
    for _ in range(ROUNDS):
        for name, taken in seconds.items():
            start = time.perf_counter()
            _loss_and_gradients(HEADS[name], hidden, weight, batch)[1].sum().item()  # waits
            taken.append(time.perf_counter() - start)
    peaks = peak_bytes(list(seconds))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        dict(name=name, seconds=medians[name], peak_bytes=peaks[name], error=errors[name])
        for name in seconds
    ]


def peak_bytes(names: list[str]) -> dict[str, int]:
    """Return the peak memory of loss and gradients, of each in a process of its own."""
    command = [sys.executable, "-m", "grpo_trainer.demo.compare"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {name: subprocess.Popen([*command, name], **pipes) for name in names}
    said = {name: process.communicate() for name, process in running.items()}
    for name, process in running.items():
        if process.returncode:
            raise RuntimeError(f"{name}: its memory could not be measured: {said[name][1]}")
    return {name: int(output.split()[-1]) for name, (output, _) in said.items()}


def rollout_difference(
    folder: Path, rows: list[dict[str, Any]], config: LossConfig
) -> tuple[float, float]:
    """Compare ours with eager fp64, at the head of the policy in ``folder``.

    Args:
        folder: of the policy and its tokenizer.
        rows: of the table of completions, with prompts of one length.
        config: the loss.

    Returns:
        The difference of the losses, and the largest one over the largest gradient, of hidden
        states and weight.
    """
    # not where memory is measured
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ends = ["" if row["truncated"] else tokenizer.eos_token for row in rows]
    texts = [row["prompt"] + row["completion"] + end for row, end in zip(rows, ends, strict=True)]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    start = len(tokenizer(rows[0]["prompt"]).input_ids)
    with torch.no_grad():
        hidden = model.model(**tokens).last_hidden_state[:, start - 1 : -1]
    advantages = torch.tensor([row["advantage"] for row in rows])
    ids, mask = tokens.input_ids[:, start:], tokens.attention_mask[:, start:]
    batch = TokenBatch.from_padded(ids, advantages, mask)
    weight = model.lm_head.weight
    ours = _loss_and_gradients(_fused, hidden, weight, batch, config)
    exact = _loss_and_gradients(_fused, hidden.double(), weight.double(), batch, config, EXACT)
    gradient = max(map(relative_error, ours[1:], exact[1:]))
    return float((ours[0].double() - exact[0]).abs()), gradient


def _loss_and_gradients(
    loss_of: Loss, hidden: Tensor, weight: Tensor, batch: TokenBatch, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the () loss, and the gradients of the hidden states and the weight."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = loss_of(hidden, weight, batch, *options)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), dhidden, dweight


def _large_head(tokens: int | None = None) -> tuple[Tensor, Tensor, TokenBatch]:
    """Return random (B, L, D) hidden states, a (V, D) weight and tokens sampled from them."""
    shape = (SEQUENCES, (tokens or TOKENS) // SEQUENCES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * SPREAD / WIDTH**0.5
    policy = (hidden.flatten(0, 1) @ weight.T).softmax(-1)
    target = torch.multinomial(policy, 1, generator=generator).view(shape)
    advantages = torch.linspace(1.0, -0.5, SEQUENCES)
    batch = TokenBatch.from_padded(target.to(device), advantages.to(device))
    return hidden.to(device, torch.bfloat16), weight.to(device, torch.bfloat16), batch


def _measure(name: str) -> int:
    """Return bytes above what was held before: the allocator's on a GPU, resident ones on a CPU."""
    torch.set_num_threads(1)
    _loss_and_gradients(HEADS[name], *_large_head(tokens=8))  # loads libraries
    inputs = _large_head()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _loss_and_gradients(HEADS[name], *inputs)
        return torch.cuda.max_memory_allocated() - before
    before = psutil.Process().memory_info().rss
    _loss_and_gradients(HEADS[name], *inputs)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would report the parent's peak if that is higher
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 - before
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # bytes on macOS


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
