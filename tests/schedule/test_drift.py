"""Training by policy gradients for 200 steps: the entropy stays where eager fp32 logits lead it.

Sampled runs part for ever after one different token, so nobody samples here but eager fp32. All
others train on its rollouts, step by step the same tokens and advantages, and a difference of
their entropies is a difference of their gradients alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import LossConfig, TokenBatch, explain, linear_policy_loss, policy_loss
from tests.support.targets import targets

pytestmark = pytest.mark.slow

STEPS, UPDATES = 200, 2  # of the optimizer; on each rollout
VOCAB, HIDDEN, LENGTH = 509, 32, 8
PROMPTS, GROUP = 4, 8  # of a rollout; completions of a prompt
CLASSES = 16  # a token is right when it is of the class that prompt and place ask for
CONFIG = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
CHUNK_ROWS = 40  # no divisor of the 256 rows of a step
# Of the logits. A softmax does not see it, logits that are rounded to 16 bits do: those of a real
# head are as large, because its vocabulary is.
OFFSET = 30.0
# Nats. Noise as that of gradients in bf16 moves the entropy by a tenth of it.
BAND = 1e-3

Head = Callable[[Tensor, Tensor, TokenBatch], Tensor]


class Policy(nn.Module):
    """The next token by prompt, place and last token: embeddings, a layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int, std: float = 1.0) -> nn.Parameter:
            return nn.Parameter(std * torch.randn(*shape, generator=generator))

        self.prompt, self.place = normal(2 * PROMPTS, HIDDEN), normal(LENGTH, HIDDEN)
        self.token = normal(VOCAB, HIDDEN)
        self.layer = normal(HIDDEN, HIDDEN, std=HIDDEN**-0.5)
        self.head = normal(VOCAB, HIDDEN, std=4 * HIDDEN**-0.5)

    def forward(self, prompt: Tensor, last: Tensor, place: Tensor) -> Tensor:
        """Return (B, L, D) states of prompts (B,), the tokens before (B, L), and places (L,)."""
        x = self.prompt[prompt].unsqueeze(1) + self.token[last] + self.place[place]
        return 1.5 * torch.tanh(x @ self.layer)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the actor sampled, and what it is worth."""

    prompt: Tensor  # (B,)
    last: Tensor  # (B, L) the token before
    batch: TokenBatch


def rounded(x: Tensor) -> Tensor:
    """Round to bf16's values in fp32; the gradient passes unrounded."""
    return x + (x.detach().bfloat16().float() - x.detach())


def full_logps(hidden: Tensor, head: Tensor) -> Tensor:
    return (rounded(hidden) @ rounded(head).t()).log_softmax(-1)


def eager(hidden: Tensor, head: Tensor, batch: TokenBatch) -> Tensor:
    """Compute full fp32 logits of bf16 values, gradients in fp32."""
    logps = full_logps(hidden.flatten(0, 1), head)
    return policy_loss(logps.gather(-1, batch.target[:, None]).squeeze(-1), batch, CONFIG).loss


def rounded_logits(hidden: Tensor, head: Tensor, batch: TokenBatch) -> Tensor:
    """Compute eager as many write it: the GEMM gives bf16, the softmax is taken in fp32."""
    logits = rounded(hidden).flatten(0, 1) @ rounded(head).t() + OFFSET
    logps = rounded(logits).log_softmax(-1).gather(-1, batch.target[:, None]).squeeze(-1)
    return policy_loss(logps, batch, CONFIG).loss


def fused(backend: str) -> Head:
    def run(hidden: Tensor, head: Tensor, batch: TokenBatch) -> Tensor:
        tile = 4 * VOCAB * CHUNK_ROWS
        arguments = hidden.bfloat16(), head.bfloat16(), batch, CONFIG
        options = dict(backend=backend, schedule="one_pass", max_workspace_bytes=tile)
        assert len(explain(*arguments, **options).chunks) > 1
        return linear_policy_loss(*arguments, **options).loss

    return run


@torch.no_grad()
def sample(policy: Policy, generator: torch.Generator) -> Rollout:
    """Sample groups of completions; the advantage is of being right more often than the group."""
    device = policy.head.device
    prompts = torch.randperm(2 * PROMPTS, generator=generator)[:PROMPTS]
    prompt = prompts.repeat_interleave(GROUP).to(device)
    tokens, logprobs = torch.zeros(len(prompt), 1, dtype=torch.int64, device=device), []
    for place in torch.arange(LENGTH, device=device):
        logps = full_logps(policy(prompt, tokens[:, -1:], place[None])[:, 0], policy.head)
        token = torch.multinomial(logps.exp().cpu(), 1, generator=generator).to(device)
        logprobs.append(logps.gather(-1, token))
        tokens = torch.cat([tokens, token], dim=1)
    last, target = tokens[:, :-1], tokens[:, 1:]
    wanted = (5 * prompt[:, None] + torch.arange(LENGTH, device=device)) % CLASSES
    reward = (target % CLASSES == wanted).float().mean(-1).view(PROMPTS, GROUP)
    centred = reward - reward.mean(-1, keepdim=True)
    advantages = (centred / (reward.std(-1, keepdim=True) + 1e-4)).flatten()
    batch = TokenBatch.from_padded(target, advantages, old_logprobs=torch.cat(logprobs, dim=1))
    return Rollout(prompt=prompt, last=last, batch=batch)


def train(head: Head, device: torch.device, rollouts: list[Rollout] | None = None) -> Tensor:
    """Train, without rollouts on samples that fill the list; return (STEPS,) mean entropies."""
    policy, generator = Policy().to(device), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    samples, rollouts = not rollouts, [] if rollouts is None else rollouts
    entropies, places = [], torch.arange(LENGTH, device=device)
    for step in range(STEPS):
        if samples and step % UPDATES == 0:
            rollouts.append(sample(policy, generator))
        rollout = rollouts[step // UPDATES]
        hidden = policy(rollout.prompt, rollout.last, places)
        with torch.no_grad():
            logps = full_logps(hidden, policy.head).double()
            entropies.append(-(logps.exp() * logps).sum(-1).mean())
        optimizer.zero_grad()
        head(hidden, policy.head, rollout.batch).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return torch.stack(entropies).cpu()


@functools.cache
def exact(device: torch.device) -> tuple[Tensor, list[Rollout]]:
    """Return the entropies of eager fp32, and the rollouts that it sampled."""
    rollouts: list[Rollout] = []
    return train(eager, device, rollouts), rollouts


def drift(head: Head, device: torch.device) -> tuple[float, float]:
    """Return the largest mean difference of a quarter of the steps, and a straight fit's change."""
    curve, rollouts = exact(device)
    difference = train(head, device, rollouts) - curve
    time = torch.linspace(-0.5, 0.5, STEPS, dtype=torch.float64)
    slope = (time * difference).sum() / time.square().sum()
    return difference.view(4, -1).mean(-1).abs().max().item(), slope.abs().item()


@pytest.mark.parametrize("backend,device", targets("triton"))
def test_entropy_does_not_drift(backend: str, device: torch.device) -> None:
    curve, _ = exact(device)
    assert curve[-20:].mean() < curve[0] - 0.3, "this policy learns nothing"
    assert max(drift(fused(backend), device)) < BAND


def test_rounded_logits_leave_the_band(device: torch.device) -> None:
    """Else the test above would show nothing."""
    assert max(drift(rounded_logits, device)) > 2 * BAND
