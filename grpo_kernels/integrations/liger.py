"""Runs Liger's loss modules on our kernels, for trainers that call them.

ms-swift and TRL before 1.12 call the GRPO module; TRL's experimental trainers and ms-swift call the
distillation module. Trainers built after ``enable()`` use ours, which do not need Liger.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_kernels.batch import IGNORE_INDEX, TokenBatch
from grpo_kernels.common import HOSTS
from grpo_kernels.head import Head, Transform, head_of_layer
from grpo_kernels.hf import logit_scale, softcap
from grpo_kernels.integrations.common import divergence_of, in_dtype_of
from grpo_kernels.integrations.probe import Probe, Replacement, find, gradients, normal, unlike
from grpo_kernels.integrations.switch import Switch, alive
from grpo_kernels.linear_logprobs import linear_logprobs
from grpo_kernels.linear_policy_loss import linear_policy_loss
from grpo_kernels.losses import LOSSES, LossConfig, Metrics, check_name

# as in Liger: trainers do not pass it the settings of other losses
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")


class LigerFusedLinearGRPOLoss(nn.Module):
    """Replacement for Liger's module of this name: the same arguments, ``(loss, metrics)``.

    ``metrics`` is a tuple of () tensors: the mean KL if ``beta`` is not 0, and the share of clipped
    tokens. docs/guides/liger.md lists the differences from Liger. Settings and their errors are as
    for :class:`grpo_kernels.LossConfig`.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,  # no effect, like chunk_size: one kernel, which chooses its chunks
        use_ref_model: bool = True,  # False: the policy is its own reference
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        arguments = {
            **locals(),
            "beta": beta if use_ref_model else 0.0,
            "epsilon": epsilon_low,
            "rollout_correction_mode": None,
        }
        check_name("loss_type", loss_type, _LOSSES)
        own = LOSSES[loss_type].settings
        if delta is not None and "delta" not in own:
            raise ValueError(f"delta: expected None for loss_type {loss_type!r}, got {delta}")
        names = arguments.keys() & {*LossConfig.__dataclass_fields__, *own}
        self.config = LossConfig(**{name: arguments[name] for name in names})
        self.beta = beta
        self.use_ref_model = use_ref_model

    def forward(
        self,
        _input: Tensor,  # (B, T, D) hidden states, or (B * T, D)
        lin_weight: Tensor,  # (V, D), converted to the dtype of _input
        selected_token_ids: Tensor,  # (B, T); without padding (N,), with cu_seqlens
        attention_mask: Tensor | None,  # of the same shape, 0 and 1
        advantages: Tensor,  # (B,), or one per token
        bias: Tensor | None = None,  # (V,)
        ref_per_token_logps: Tensor | None = None,  # as selected_token_ids; None: from ref_input
        old_per_token_logps: Tensor | None = None,  # as selected_token_ids
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        # (B,), (B, 1) or (B, T) factors on the tokens' loss; in vespo's weight of a sequence one
        # per sequence counts once
        vllm_is_ratio: Tensor | None = None,
        # divisor of dapo, cispo and vespo, over all processes; None: their valid tokens
        num_items_in_batch: Tensor | float | None = None,
        cu_seqlens: Tensor | None = None,  # (B + 1,) offsets of sequences without padding
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and its metrics; a ValueError may name one of our arguments."""
        config = self.config
        ids = selected_token_ids.long()
        hidden = _input.reshape(*ids.shape, _input.shape[-1])
        head = in_dtype_of(hidden, Head(lin_weight, bias))
        reference = ref_per_token_logps
        if config.beta == 0:
            reference = None
        elif reference is None and ref_input is not None and ref_weight is not None:
            ref_hidden = ref_input.reshape(*ids.shape, -1)
            with torch.no_grad():
                reference = linear_logprobs(
                    ref_hidden, ref_weight, ids, bias=ref_bias, temperature=config.temperature
                ).logprobs
        mask = ids != IGNORE_INDEX if attention_mask is None else attention_mask
        make: Any = TokenBatch.from_padded
        if cu_seqlens is not None:
            make = functools.partial(TokenBatch.from_packed, cu_seqlens=cu_seqlens)
        batch = make(
            ids,
            # per token, so that clipping is counted in tokens at every ratio level
            _per_token("advantages", advantages, ids, cu_seqlens),
            mask=mask,
            old_logprobs=old_per_token_logps,
            ref_logprobs=reference,
            rollout_weights=_per_token("vllm_is_ratio", vllm_is_ratio, ids, cu_seqlens),
            num_items_in_batch=_tokens_per_process(mask, num_items_in_batch),
        )
        per_sequence = vllm_is_ratio is not None and vllm_is_ratio.shape != ids.shape
        if per_sequence and config.surrogate.uses_rollout_weight:
            # a loss that multiplies a sequence's weights must get the factor only once
            places = torch.arange(batch.num_tokens, device=ids.device)
            first = torch.isin(places, batch.cu_seqlens[:-1])
            batch = replace(batch, rollout_weights=batch.rollout_weights.where(first, 1.0))
        loss, metrics = linear_policy_loss(hidden, head, batch, config)
        clipped = _mean(metrics, _CLIPPED, loss)
        return loss, (clipped,) if self.beta == 0 else (_mean(metrics, ["kl"], loss), clipped)


class LigerFusedLinearJSDLoss(nn.Module):
    """Replacement for Liger's module of this name, with the same arguments.

    The loss is ``weight_hard_loss`` times the labels' mean cross-entropy at temperature 1, plus
    ``weight_soft_loss`` times the mean divergence, over tokens with a label other than
    ``ignore_index``. The divergence is KL(teacher, student) for ``beta`` 0, KL(student, teacher)
    for 1, and the JSD (arXiv:2306.13649) in between.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,  # no effect, like chunk_size
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.beta = beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,  # (..., D)
        student_weight: Tensor,  # (V, D)
        teacher_input: Tensor,  # (..., D_t)
        teacher_weight: Tensor,  # (V, D_t), or with more rows: the student's logits there are 0
        true_labels: Tensor,  # (...)
        student_bias: Tensor | None = None,  # (V,)
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the loss; with ``return_soft_hard_loss`` also the divergence and cross-entropy.

        These two are not differentiable. A ValueError may name an argument of
        ``linear_divergence``.
        """
        mask = true_labels != self.ignore_index
        student = Head(student_weight, student_bias)
        teacher = Head(teacher_weight, teacher_bias)
        soft = divergence_of(
            self.beta,
            hidden=student_input,
            head=_padded(student, rows=max(teacher.vocab_size - student.vocab_size, 0)),
            teacher_hidden=teacher_input,
            teacher=teacher,
            mask=mask,
            temperature=self.temperature,
        ).loss
        loss = self.weight_soft_loss * soft
        if not self.weight_hard_loss and not self.return_soft_hard_loss:
            return loss
        ids = true_labels.masked_fill(~mask, IGNORE_INDEX)
        logprobs = linear_logprobs(student_input, in_dtype_of(student_input, student), ids).logprobs
        assert logprobs is not None
        hard = -logprobs.sum() / mask.sum().clamp(min=1)
        loss = loss + self.weight_hard_loss * hard
        return (loss, soft.detach(), hard.detach()) if self.return_soft_hard_loss else loss


def _padded(head: Head, rows: int) -> Head:
    if not rows or head.weight.dim() != 2:  # the divergence rejects these
        return head
    bias = None if head.bias is None else nn.functional.pad(head.bias, (0, rows))
    return Head(nn.functional.pad(head.weight, (0, 0, 0, rows)), bias)


_GRPO = "liger_kernel.chunked_loss.grpo_loss"
_JSD = "liger_kernel.chunked_loss.jsd_loss"


def _replacements() -> Iterator[Replacement]:
    grpo, jsd = LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss
    yield Replacement(_GRPO, grpo.__name__, grpo, everywhere=True, more=("cu_seqlens",))
    yield Replacement(_JSD, jsd.__name__, jsd, everywhere=True)


def _too_late() -> str:
    for each in _replacements():
        if alive(find(each.place)):
            return f"expected no {each.name} of Liger yet, got one"
    return ""


def _compare() -> Iterator[str]:
    theirs = import_module(_GRPO).LigerFusedLinearGRPOLoss
    for name in _LOSSES:
        settings = {"loss_type": name, "beta": 0.1}
        if name == "luspo":  # Liger counts padding at the token level, and in its KL
            settings |= {"importance_sampling_level": "sequence", "beta": 0.0}
        ours = _grpo_loss(LigerFusedLinearGRPOLoss, settings)
        yield from unlike(f"LigerFusedLinearGRPOLoss, {name}", _grpo_loss(theirs, settings), ours)
    theirs = import_module(_JSD).LigerFusedLinearJSDLoss
    for beta in (0.0, 0.3, 1.0):
        ours = _jsd_loss(LigerFusedLinearJSDLoss, beta)
        yield from unlike(f"LigerFusedLinearJSDLoss, beta {beta}", _jsd_loss(theirs, beta), ours)


def _grpo_loss(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's loss and metrics for two sequences, and gradients."""
    hidden, weight, bias = normal(2, 3, 8), normal(11, 8, seed=1), normal(11, seed=2)
    module = kind(
        compiled=False, temperature=0.7, epsilon_high=1.5, max_completion_length=4, **settings
    )
    loss, metrics = module(
        hidden,
        weight,
        torch.tensor([[1, 5, 2], [7, 3, 10]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]),
        torch.tensor([1.0, -0.5]),
        bias,
        ref_per_token_logps=normal(2, 3, seed=4).detach() * 0.3 - 3,
        old_per_token_logps=normal(2, 3, seed=3).detach() * 0.3 - 3,
        num_items_in_batch=torch.tensor(7),
    )
    named = {f"metric {number}": value for number, value in enumerate(metrics)}
    return {"loss": loss, **named, **gradients(loss, hidden=hidden, weight=weight, bias=bias)}


def _jsd_loss(kind: Any, beta: float) -> dict[str, Any]:
    hidden, weight, bias = normal(5, 8), normal(11, 8, seed=1), normal(11, seed=2)
    loss = kind(beta=beta, temperature=0.7, compiled=False)(
        student_input=hidden,
        student_weight=weight,
        teacher_input=normal(5, 6, seed=3).detach(),
        teacher_weight=normal(11, 6, seed=4).detach(),
        true_labels=torch.tensor([1, -100, 3, 10, 2]),
        student_bias=bias,
    )
    return {"loss": loss, **gradients(loss, hidden=hidden, weight=weight, bias=bias)}


SWITCH = Switch(Probe(host=HOSTS["liger"], replacements=_replacements, compare=_compare), _too_late)
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled


def put_into(
    trainer: Any,
    attribute: str,
    off: Mapping[str, Any],
    why: str,
    *,
    any_version: bool = False,
) -> None:
    """Replace a trainer's Liger module, its ``attribute``, by ours with the same settings.

    Raises:
        ImportError: Liger is not installed, or differs from the version that ours replaces.
        ValueError: a setting of the trainer differs from ``off`` (``why`` is the reason); the
            model's logits need more than the weight and bias of ``lm_head``, which are all that the
            module gets; or our module rejects a setting.
    """
    for name, expected in off.items():
        if (got := getattr(trainer, name, expected)) != expected:
            raise ValueError(f"{name}: expected {expected} {why}, got {got}")
    SWITCH.check(any_version)
    theirs = getattr(trainer, attribute)
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config.get_text_config()
    scale = logit_scale(config)
    cap = softcap(config)
    if scale != 1 or cap is not None:
        raise ValueError(
            "model: expected logits without scale and softcap, which Liger's module does not "
            f"support; got scale {scale} and softcap {cap} ({config.model_type})"
        )
    if head_of_layer(model.get_output_embeddings(), Transform()).lora is not None:
        raise ValueError(
            "model: expected lm_head without an adapter, because Liger's module does not get the "
            "adapter; got LoRA or trainable_token_indices on it"
        )
    if not isinstance(theirs, LigerFusedLinearGRPOLoss):  # already ours after enable()
        names = inspect.signature(LigerFusedLinearGRPOLoss).parameters
        ours = LigerFusedLinearGRPOLoss(**{name: getattr(theirs, name) for name in names})
        setattr(trainer, attribute, ours)


def _per_token(name: str, values: Any, ids: Tensor, cu_seqlens: Tensor | None) -> Any:
    """Return values, per sequence or per token and possibly integers, in the shape of the ids."""
    if values is None:
        return None
    values = values * 1.0
    if values.shape == ids.shape:
        return values
    sequences = ids.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if values.shape not in ((sequences,), (sequences, 1)):
        raise ValueError(
            f"{name}: expected shape ({sequences},) (per sequence) or {tuple(ids.shape)} "
            f"(per token), got {tuple(values.shape)}"
        )
    if cu_seqlens is None:
        return values.reshape(-1, 1).expand(ids.shape)
    return torch.repeat_interleave(values.reshape(-1), cu_seqlens.diff().long())


def _mean(metrics: Metrics, names: Iterable[str], like: Tensor) -> Tensor:
    """Return the mean of the first metric that exists; 0 if none does, or without valid tokens."""
    for stat in (metrics.stats[name] for name in names if name in metrics):
        return (stat.total / stat.count.clamp(min=1)).float()
    return torch.zeros_like(like.detach())


def _tokens_per_process(mask: Tensor, num_items: Tensor | float | None) -> Tensor:
    """Return the number of tokens to divide by, as a mean over processes."""
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    tokens = mask.sum() if num_items is None else num_items
    tokens = torch.as_tensor(tokens, dtype=torch.float64, device=mask.device)
    if num_items is None and processes > 1:
        dist.all_reduce(tokens)
    return (tokens / processes).clamp(min=1)
