"""The fused head against eager full logits: same numbers, less memory.

``python -m grpo_trainer.demo.head BACKEND`` prints the peak bytes of one loss and its gradients.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_kernels import Head, LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.hf import add_fused_head
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import MicroBatch, Rollout, collate, decode_completions, encode_prompts
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.experience import compute_advantages
from grpo_trainer.rollout import Sampling, TransformersEngine

# a head of real size: T tokens, width D, V vocabulary entries
TOKENS, WIDTH, VOCABULARY = 1024, 64, 32768
EAGER, FUSED = "reference", "auto"  # backends


class Difference(NamedTuple):
    """Fused fp32 against eager fp64."""

    loss: float  # largest absolute difference
    gradient: float  # largest difference over the largest gradient, of hidden states and weight


def rollout_difference(model_folder: Path, dataset: Dataset, config: LossConfig) -> Difference:
    """Compare on a rollout of the policy in ``model_folder``, with the rewards that it got."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    batch = _rollout(model, model_folder, dataset, config)
    add_fused_head(model)
    with torch.no_grad():
        hidden, weight = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, head_fn=_keep
        ).head
    return _difference(hidden, weight, batch.token_batch(1), config)


def large_head_difference(config: LossConfig) -> Difference:
    """Compare on random hidden states and a vocabulary of real size."""
    return _difference(*_large_head(), config)


def peak_bytes(backend: str) -> int:
    """Return peak memory of loss and gradients of the large head, in a process of its own."""
    command = [sys.executable, "-m", "grpo_trainer.demo.head", backend]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _keep(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    return hidden, head.weight


def _rollout(
    model: PreTrainedModel, folder: Path, dataset: Dataset, config: LossConfig, group: int = 16
) -> MicroBatch:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = GRPOConfig(
        output_dir=str(folder), max_completion_length=config.max_completion_length or 1
    )
    rows = [row for row in dataset for _ in range(group)]
    prompts = [row["prompt"] for row in rows]
    prompt_ids = [prompt.ids for prompt in encode_prompts(prompts, tokenizer)]
    engine, sampling = (
        TransformersEngine(lambda: model, tokenizer),
        Sampling.from_config(args, tokenizer),
    )
    completion_ids = engine.generate(prompt_ids, sampling).token_ids
    completions = decode_completions(completion_ids, prompts, tokenizer)
    rewards = digits_reversal_reward(completions, [row["answer"] for row in rows])
    advantages = compute_advantages(torch.tensor(rewards)[:, None], torch.ones(1), group).advantages
    tokens = torch.tensor(float(sum(map(len, completion_ids))))
    made = zip(prompts, prompt_ids, completions, completion_ids, strict=True)
    rollouts = [Rollout(*fields) for fields in made]
    return collate(rollouts, advantages, tokens, tokens, tokenizer.pad_token_id or 0)


def _difference(
    hidden: Tensor, weight: Tensor, batch: TokenBatch, config: LossConfig
) -> Difference:
    fused = _loss_and_gradients(hidden, weight, batch, config, FUSED)
    eager = _loss_and_gradients(hidden.double(), weight.double(), batch, config, EAGER)
    gradient = max(
        float((ours.double() - exact).abs().amax() / exact.abs().amax())
        for ours, exact in zip(fused[1:], eager[1:], strict=True)
    )
    return Difference(float((fused[0].double() - eager[0]).abs()), gradient)


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, batch: TokenBatch, config: LossConfig, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = linear_policy_loss(hidden, weight, batch, config, backend=backend).loss
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), dhidden, dweight


def _large_head(tokens: int = TOKENS) -> tuple[Tensor, Tensor, TokenBatch]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, tokens // 4, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5
    target = torch.randint(VOCABULARY, (4, tokens // 4), generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    batch = TokenBatch.from_padded(target.to(device), advantages.to(device))
    return hidden.to(device), weight.to(device), batch


def _measure(backend: str) -> int:
    """Return bytes above what was held before: the allocator's on a GPU, resident ones on a CPU."""
    config = LossConfig()
    _loss_and_gradients(*_large_head(tokens=8), config, backend)  # loads libraries and threads
    inputs = _large_head()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _loss_and_gradients(*inputs, config, backend)
        return torch.cuda.max_memory_allocated() - before
    before = psutil.Process().memory_info().rss
    _loss_and_gradients(*inputs, config, backend)
    return _peak_resident_bytes() - before


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would report the parent's peak if that is higher
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
