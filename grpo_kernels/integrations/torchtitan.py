"""Losses for torchtitan's RL trainer, computed at the head instead of by its chunked loss.

Settings, inputs and metrics are the same as torchtitan's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.batch import TokenBatch
from grpo_kernels.common import HOSTS
from grpo_kernels.fused_head import FusedHead
from grpo_kernels.integrations.probe import Probe, Use
from grpo_kernels.losses import LossConfig, Metrics

_LOSS = "torchtitan.components.loss"
# torchtitan's losses import vLLM, so numbers are not compared
PROBE = Probe(
    host=HOSTS["torchtitan"],
    uses=(
        Use(f"{_LOSS}:BaseLoss.Config"),
        Use(f"{_LOSS}:ChunkedLossWrapper", ("config", "compile_config"), exact=True),
        Use(f"{_LOSS}:ChunkedLossWrapper.set_lm_head", ("lm_head",), exact=True),
        Use(
            f"{_LOSS}:ChunkedLossWrapper.__call__",
            ("pred", "labels", "global_valid_tokens", "loss_inputs"),
            exact=True,
        ),
        Use("torchtitan.config:CompileConfig"),
    ),
    override="",
)
PROBE.check()  # before importing names that other versions may lack
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402

_INPUTS = ("generator_logprobs", "advantages", "loss_mask")
_DIFFERENT = 1e-6  # torchtitan's threshold for a difference


class DAPOLoss(ChunkedLossWrapper):
    """Clipped policy loss with separate bounds below and above (arXiv:2503.14476).

    The trainer treats it as a chunked loss: it passes hidden states and sets the head, which is
    called once, as a module, for FSDP2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        ratio_clip_low: float = 0.2
        ratio_clip_high: float = 0.2

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.lm_head: FusedHead | None = None
        low, high = config.ratio_clip_low, config.ratio_clip_high
        self.config = LossConfig(loss_type="dapo", epsilon=low, epsilon_high=high)
        self._log_bounds = math.log1p(-low), math.log1p(high)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Make it a FusedHead; raise ValueError for a wrapped forward (tensor parallelism)."""
        self.lm_head = FusedHead(lm_head)

    def __call__(
        self,
        pred: Tensor,  # (B, L, D) hidden states, from a model that skips its head
        labels: Tensor,  # (B, L) the next token of each one
        global_valid_tokens: Tensor | float | None = None,  # divides the sums over tokens; None: 1
        **loss_inputs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, (), and torchtitan's metrics; raise ValueError for wrong inputs.

        ``loss_inputs`` are ``generator_logprobs``, ``advantages`` and the bool ``loss_mask``,
        (B, L). Tokens with a generator log-probability that is not finite are left out.
        """
        if self.lm_head is None:
            raise ValueError("lm_head: expected set_lm_head(lm_head) before the first call")
        got = [name for name, x in loss_inputs.items() if x is not None or name not in _INPUTS]
        if set(got) != set(_INPUTS):
            raise ValueError(f"loss_inputs: expected {', '.join(_INPUTS)}, got {', '.join(got)}")
        sampled = loss_inputs["generator_logprobs"]
        mask = loss_inputs["loss_mask"] & sampled.isfinite()
        tokens = 1.0 if global_valid_tokens is None else global_valid_tokens
        tokens = torch.as_tensor(tokens, dtype=torch.float64, device=pred.device).clamp(min=1)
        batch = TokenBatch.from_padded(
            labels,
            loss_inputs["advantages"],
            mask,
            old_logprobs=sampled.masked_fill(~mask, 0.0),
            num_items_in_batch=tokens,
        )
        loss, metrics = self.lm_head.policy_loss(pred, batch, self.config)
        return loss, {"loss/mean": loss.detach(), **self._metrics(metrics, batch, tokens)}

    def _metrics(self, metrics: Metrics, batch: TokenBatch, tokens: Tensor) -> dict[str, Tensor]:
        """Return sums over the tokens here, divided by the number of tokens on all processes."""
        assert metrics.logprobs is not None and metrics.entropy is not None
        assert batch.old_logprobs is not None
        difference = (metrics.logprobs - batch.old_logprobs).double()
        low, high = self._log_bounds
        clipped = (difference < low - _DIFFERENT) | (difference > high + _DIFFERENT)
        sums = {
            "loss/ratio_mean": metrics.stats["ratio/ess"].total[0],
            "loss/ratio_clipped_frac": clipped.sum(),
            "bit_wise/logprob_diff/mean": difference.sum(),
            "bit_wise/ratio_tokens_different/mean": (difference.abs() > _DIFFERENT).sum(),
            "trainer/entropy/mean": metrics.entropy.sum(),
        }
        means = {name: (value / tokens).float() for name, value in sums.items()}
        largest = torch.cat([difference.abs(), difference.new_zeros(1)]).max().float()
        return means | {"bit_wise/logprob_diff/max": largest}


class GRPOLoss(DAPOLoss):
    """Clipped policy loss with one bound for both sides."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        clip_eps: float = 0.2

    def __init__(self, config: Config, **options: Any) -> None:
        bound = config.clip_eps
        super().__init__(DAPOLoss.Config(ratio_clip_low=bound, ratio_clip_high=bound), **options)
