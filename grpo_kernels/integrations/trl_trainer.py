"""TRL's GRPOTrainer with the loss at the head: three GEMMs compute loss and gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.batch import TokenBatch
from grpo_kernels.common import HOSTS
from grpo_kernels.head import Head
from grpo_kernels.integrations.probe import Probe, Use, gradient, normal, tiny_model, unlike
from grpo_kernels.integrations.trl_head import SWITCH, add_fused_lm_head
from grpo_kernels.linear_policy_loss import linear_policy_loss
from grpo_kernels.losses import LOSSES, LossConfig, Metrics, PolicyLossOutput

# a model's inputs other than ids and mask, under TRL's names
_OF_IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
# inputs that TRL needs to split images into smaller batches, or that we compute ourselves
_NOT_READ = ("num_images", "num_tiles", "importance_sampling_ratio")
# metrics of TRL's loss
_LOGGED = ("kl", "entropy", "policy_loss", "cispo_clip_ratio", "vespo/phi_seq_mean")
_EXTREMES = ("clip_ratio/low_min", "clip_ratio/high_max")  # NaN over no tokens; others are 0


class FusedGRPOTrainer(GRPOTrainer):
    """``trl.GRPOTrainer`` with its policy loss computed at the LM head.

    Arguments and metrics are the same. Old and reference log-probabilities also come from our head,
    which may have a LoRA adapter. A subclass may set ``any_version``.

    Raises:
        ImportError: TRL differs from what this class overrides and reads; the message says where.
        ValueError: our head does not support the model's head.
    """

    any_version = False  # True: also run with versions of TRL that differ
    _entropy_window_stats: Any  # of TRL: (2,) sum and count of a step so far, or None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        PROBE.check(self.any_version)
        with SWITCH.enabled(any_version=self.any_version):
            super().__init__(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        config = self._loss_config()
        batch = self._token_batch(inputs)
        length = inputs["completion_ids"].shape[1]

        def loss_of(hidden: Tensor, head: Head) -> PolicyLossOutput:
            return linear_policy_loss(hidden[:, -length - 1 : -1], head, batch, config)

        model_inputs = {name: inputs[name] for name in _OF_IMAGES if inputs.get(name) is not None}
        for name, ours in {"ids": "input_ids", "mask": "attention_mask"}.items():
            both = [inputs[f"prompt_{name}"], inputs[f"completion_{name}"]]
            model_inputs[ours] = torch.cat(both, dim=1)
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        with self.accelerator.autocast():
            output = model(**model_inputs, head_fn=loss_of)
        loss, metrics = output.head
        if self.use_adaptive_entropy and self._mode == "train":
            self._adapt_entropy_coef(metrics)
        self._log_metrics(metrics)
        if not self.aux_loss_enabled:
            return loss
        aux_loss = self.accelerator.gather_for_metrics(output.aux_loss.detach()).mean()
        self._metrics[self._mode]["aux_loss"].append(aux_loss.item())
        return loss + self.router_aux_loss_coef * output.aux_loss / self._steps

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _steps(self) -> int:
        """Micro-batches of an optimizer step; evaluation accumulates nothing."""
        return self.current_gradient_accumulation_steps if self._mode == "train" else 1

    def _loss_config(self) -> LossConfig:
        """Return the config for TRL's current settings, which callbacks may change."""
        args = self.args
        settings = {
            name: getattr(self, name, getattr(args, name))
            for name in (*LossConfig.__dataclass_fields__, *LOSSES[self.loss_type].settings)
            if hasattr(args, name)
        }
        if self.use_adaptive_entropy:
            settings["entropy_coef"] = 1.0  # the coefficient is a factor of each batch
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return LossConfig(
            rollout_correction_mode=args.vllm_importance_sampling_mode if corrects else None,
            rollout_correction_max=args.vllm_importance_sampling_clip_max,
            rollout_correction_min=args.vllm_importance_sampling_clip_min,
            **settings,
        )

    def _token_batch(self, inputs: dict[str, Any]) -> TokenBatch:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        items = inputs["num_items_in_batch"].double() / self.accelerator.num_processes
        if self._mode == "train":  # over the generation batch; a step may be a part of it
            items = items * self._steps / self.args.steps_per_generation
        scale = None  # the coefficient is constant
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
        """Move the coefficient toward the target once per step, by the entropy of all tokens."""
        stat = metrics.stats.get("entropy_top", metrics.stats["entropy"])
        sums = torch.stack([stat.total, stat.count])
        earlier = self._entropy_window_stats
        self._entropy_window_stats = sums if earlier is None else earlier + sums
        if not self.accelerator.sync_gradients:
            return
        total, count = self.accelerator.reduce(self._entropy_window_stats, "sum").tolist()
        self._entropy_window_stats = None
        self._last_world_entropy = total / max(count, 1)
        args = self.args
        delta = args.entropy_coef_delta
        if self._last_world_entropy > args.entropy_target:
            delta = -delta
        moved = self.entropy_coef + delta
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


# the settings that we read from TRL's config, at values that have an effect
_CONFIG: dict[str, Any] = {
    "beta": 0.1,
    "delta": 1.3,
    "entropy_coef": 0.2,
    "entropy_coef_delta": 0.02,
    "entropy_coef_max": 0.3,
    "entropy_coef_min": 0.1,
    "entropy_target": 2.0,
    "epsilon": 0.1,
    "epsilon_high": 1.2,
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "max_completion_length": 5,
    "off_policy_mask_threshold": 0.4,
    "sapo_temperature_neg": 0.5,
    "sapo_temperature_pos": 2.0,
    "steps_per_generation": 4,
    "temperature": 0.7,
    "top_entropy_quantile": 1.0,  # a smaller share would cover the tokens of all processes
    "use_bias_correction_kl": True,
    "vespo_k_neg": 2.0,
    "vespo_k_pos": 2.5,
    "vespo_lambda_neg": 3.0,
    "vespo_lambda_pos": 2.0,
    "vllm_importance_sampling_clip_max": 1.1,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_mode": "token_truncate",
}
# and from its trainer: settings that it copies, and the rest
_COPIED = (
    "beta", "entropy_coef", "epsilon_high", "importance_sampling_level", "loss_type",
    "max_completion_length", "off_policy_mask_threshold", "temperature", "top_entropy_quantile",
)  # fmt: skip
_STATE: dict[str, Any] = {
    "_entropy_bonus_enabled": True,
    "_entropy_window_stats": None,
    "_last_world_entropy": 1.0,
    "accelerator": SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=True,
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        autocast=nullcontext,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, reduction: x,
        unwrap_model=lambda x: x,
    ),
    "aux_loss_enabled": False,
    "current_gradient_accumulation_steps": 2,
    "epsilon_low": _CONFIG["epsilon"],
    "router_aux_loss_coef": 0.0,
    "use_adaptive_entropy": True,
    "use_vllm": True,
    "vllm_importance_sampling_correction": True,
}
_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")


class _Inputs(dict[str, Any]):
    """Inputs that record which names TRL reads."""

    def __init__(self) -> None:
        ids = torch.tensor([[3, 5, 1], [2, 7, 4]])
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        of_tools = torch.tensor([[1, 0, 1], [1, 1, 1]])
        old, sampled, reference = (normal(2, 3, seed=seed).detach() * 0.3 - 3 for seed in (1, 2, 3))
        ratio = ((old - sampled) * mask * of_tools).exp()
        super().__init__(
            prompt_ids=torch.tensor([[1, 6], [0, 9]]),
            prompt_mask=torch.tensor([[1, 1], [0, 1]]),
            completion_ids=ids,
            completion_mask=mask,
            tool_mask=of_tools,
            advantages=torch.tensor([1.0, -0.5]),
            num_items_in_batch=torch.tensor(7),
            old_per_token_logps=old,
            ref_per_token_logps=reference,
            sampling_per_token_logps=sampled,
            importance_sampling_ratio=ratio.clamp(max=_CONFIG["vllm_importance_sampling_clip_max"]),
        )
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


def _compare() -> Iterator[str]:
    inputs = _Inputs()
    their_model = _scoring_model(import_module("trl.trainer.utils").add_fused_lm_head)
    our_model = _scoring_model(add_fused_lm_head)
    for loss_type in _LOSSES:
        theirs = _loss_of(GRPOTrainer, their_model, loss_type, inputs)
        for name in sorted(inputs.read - {*inputs, *_OF_IMAGES, *_NOT_READ}):
            yield f"_compute_loss, {loss_type}: unknown input {name!r}"
        ours = _loss_of(FusedGRPOTrainer, our_model, loss_type, inputs)
        yield from unlike(f"_compute_loss, {loss_type}", theirs, ours)


def _scoring_model(add: Any) -> Any:
    model = tiny_model()
    add(model, temperature=_CONFIG["temperature"], outputs=("log_probs", "entropy"))
    return model


def _loss_of(kind: type[Any], model: Any, loss_type: str, inputs: _Inputs) -> dict[str, Any]:
    """Return the loss, logs and gradient of a trainer that has only the state above."""
    config = {**_CONFIG, "loss_type": loss_type}
    trainer = object.__new__(kind)
    vars(trainer).update(
        _STATE,
        **{name: config[name] for name in _COPIED},
        args=SimpleNamespace(**config),
        model=model,
        _metrics={"train": defaultdict(list)},
    )
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    logs = {name: values[0] for name, values in trainer._metrics["train"].items()}
    adapted = {"new entropy_coef": trainer.entropy_coef}
    return {"loss": loss, **logs, **adapted, "gradient": gradient(model)}


PROBE = Probe(
    host=HOSTS["trl"],
    uses=(
        Use("trl:GRPOTrainer._compute_loss", ("model", "inputs"), exact=True),
        Use("trl:GRPOTrainer", attributes=(*_COPIED, *_STATE, "args", "model", "_metrics")),
        Use("trl:GRPOConfig", tuple(_CONFIG)),
    ),
    compare=_compare,
    override="a subclass of FusedGRPOTrainer with any_version = True",
)
