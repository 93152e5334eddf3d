"""TRL's GRPOTrainer with the loss at the head, where three GEMMs give loss and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.batch import TokenBatch
from grpo_kernels.head import Head
from grpo_kernels.integrations.trl import SWITCH
from grpo_kernels.linear_policy_loss import linear_policy_loss
from grpo_kernels.losses import LOSSES, LossConfig, Metrics, PolicyLossOutput

# what a model takes besides ids and mask, under TRL's names of its inputs
_OF_IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
# metrics of TRL's loss
_LOGGED = ("kl", "entropy", "policy_loss", "cispo_clip_ratio", "vespo/phi_seq_mean")
_EXTREMES = ("clip_ratio/low_min", "clip_ratio/high_max")  # NaN over no tokens; others are 0


class FusedGRPOTrainer(GRPOTrainer):
    """``trl.GRPOTrainer``, by its arguments, whose policy loss is formed at the LM head.

    The metrics are the same. Old and reference log-probabilities come from our head as well, which
    may have a LoRA adapter.

    Raises:
        ImportError: TRL is of a version that was not tested.
        ValueError: the head cannot be expressed by ours.
    """

    _entropy_window_stats: Any  # TRL's: (2,) sum and count of a step so far, or None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with SWITCH.enabled():
            super().__init__(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        config, batch = self._loss_config(), self._token_batch(inputs)
        length = inputs["completion_ids"].shape[1]

        def loss_of(hidden: Tensor, head: Head) -> PolicyLossOutput:
            return linear_policy_loss(hidden[:, -length - 1 : -1], head, batch, config)

        ids, mask = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1)
            for name in ("ids", "mask")
        )
        given = {name: inputs[name] for name in _OF_IMAGES if inputs.get(name) is not None}
        if self.aux_loss_enabled:
            given["output_router_logits"] = True
        with self.accelerator.autocast():
            found = model(input_ids=ids, attention_mask=mask, head_fn=loss_of, **given)
        loss, metrics = found.head
        if self.use_adaptive_entropy and self._mode == "train":
            self._adapt_entropy_coef(metrics)
        self._log_metrics(metrics)
        if not self.aux_loss_enabled:
            return loss
        aux_loss = self.accelerator.gather_for_metrics(found.aux_loss.detach()).mean()
        self._metrics[self._mode]["aux_loss"].append(aux_loss.item())
        return loss + self.router_aux_loss_coef * found.aux_loss / self._steps

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _steps(self) -> int:
        """Micro-batches of an optimizer step; evaluation accumulates nothing."""
        return self.current_gradient_accumulation_steps if self._mode == "train" else 1

    def _loss_config(self) -> LossConfig:
        """Return the loss as TRL's settings are now: callbacks may change them."""
        args, own = self.args, LOSSES[self.loss_type].settings
        known = {
            name: getattr(self, name, getattr(args, name))
            for name in (*LossConfig.__dataclass_fields__, *own)
            if hasattr(args, name)
        }
        if self.use_adaptive_entropy:
            known["entropy_coef"] = 1.0  # it is the factor of each batch
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return LossConfig(
            rollout_correction_mode=args.vllm_importance_sampling_mode if corrects else None,
            rollout_correction_max=args.vllm_importance_sampling_clip_max,
            rollout_correction_min=args.vllm_importance_sampling_clip_min,
            **known,
        )

    def _token_batch(self, inputs: dict[str, Any]) -> TokenBatch:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        items = inputs["num_items_in_batch"].double() / self.accelerator.num_processes
        if self._mode == "train":  # of the generation batch, of which a step may be a part
            items = items * self._steps / self.args.steps_per_generation
        scale = None  # it is constant
        if self.use_adaptive_entropy:
            below = self._last_world_entropy <= self.args.entropy_target
            scale = self.entropy_coef if below else 0.0
        return TokenBatch.from_padded(
            inputs["completion_ids"],
            inputs["advantages"],
            mask,
            old_logprobs=inputs.get("old_per_token_logps"),
            ref_logprobs=inputs.get("ref_per_token_logps") if self.beta != 0 else None,
            rollout_logprobs=inputs.get("sampling_per_token_logps"),
            num_items_in_batch=items,
            gradient_accumulation_steps=self._steps,
            entropy_scale=scale,
        )

    def _adapt_entropy_coef(self, metrics: Metrics) -> None:
        """Move the coefficient towards the target once a step, by the entropy of all its tokens."""
        stat = metrics.stats.get("entropy_top", metrics.stats["entropy"])
        seen = torch.stack([stat.total, stat.count])
        earlier = self._entropy_window_stats
        self._entropy_window_stats = seen if earlier is None else earlier + seen
        if not self.accelerator.sync_gradients:
            return
        total, count = self.accelerator.reduce(self._entropy_window_stats, "sum").tolist()
        self._entropy_window_stats, self._last_world_entropy = None, total / max(count, 1)
        args, below = self.args, self._last_world_entropy <= self.args.entropy_target
        moved = self.entropy_coef + (args.entropy_coef_delta if below else -args.entropy_coef_delta)
        self.entropy_coef = min(max(moved, args.entropy_coef_min), args.entropy_coef_max)

    def _log_metrics(self, metrics: Metrics) -> None:
        log = self._metrics[self._mode]
        for name, stat in metrics.gathered(self.accelerator.gather).stats.items():
            if name in _LOGGED or name.startswith("clip_ratio/"):
                value = stat.value()
                if name not in _EXTREMES:
                    value = value.where(stat.count > 0, 0.0)
                log[name].append(value.item())
        train = self._mode == "train"
        if self._entropy_bonus_enabled and train and self.accelerator.sync_gradients:
            log["entropy_coef"].append(self.entropy_coef)
