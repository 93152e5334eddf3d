"""FusedHead: an LM head that you call as a module to get log-probabilities or a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, overload

from torch import Tensor, nn

from grpo_kernels.batch import TokenBatch
from grpo_kernels.common import ForwardOverlay, apply_overlay, remove_overlay
from grpo_kernels.head import Head, Transform, head_of_layer, unshard_head
from grpo_kernels.linear_divergence import LinearDivergence, linear_divergence
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs
from grpo_kernels.linear_policy_loss import linear_policy_loss
from grpo_kernels.losses import LossConfig, PolicyLossOutput

HeadFn = Callable[[Tensor, Head], Any]


class FusedHead(ForwardOverlay, nn.Module):
    """An LM head that computes log-probabilities or a loss without storing logits.

    ``FusedHead(lm_head)`` returns ``lm_head`` itself, now also a FusedHead: its parameters, hooks,
    ``isinstance`` and the references to it stay the same. Doing it twice is harmless. Call the head
    as a module under FSDP1, FSDP2, DeepSpeed's ZeRO-3 or accelerate's hooks: they gather or move
    parameters, and reduce their gradients, only for a module that is *called*, not for a weight
    that is read.

    ::

        model.lm_head = FusedHead(model.lm_head)
        logits = model.lm_head(hidden)  # as before, so generation works
        logprobs = model.lm_head(hidden, target, temperature=0.7).logprobs
        loss, metrics = model.lm_head.policy_loss(hidden, batch, config)

    Args:
        layer: an ``nn.Linear``, or PEFT's wrapper of one (LoRA, ``modules_to_save``,
            ``trainable_token_indices``); each call looks up its active adapters.
        logit_scale, softcap: as in :func:`grpo_kernels.linear_logprobs`; ``head(hidden)`` returns
            logits without them.
        vocab_size: number of ids in use, if the weight has padding rows after them; None: all.

    Raises:
        ValueError: ``layer`` is not a module, or has a forward other than its class's. In a call:
            the layer is not linear, is quantized, or has an adapter that is not plain LoRA.
    """

    _prefix = "Fused"

    def __new__(cls, layer: nn.Module, **settings: Any) -> FusedHead:
        if not isinstance(layer, nn.Module):
            raise ValueError(f"layer: expected an nn.Module, got {type(layer).__name__}")
        if not isinstance(layer, FusedHead):
            _swap_class(apply_overlay, layer)
        return layer  # type: ignore[return-value]

    def __init__(
        self,
        layer: nn.Module,
        *,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._transform = Transform(logit_scale, softcap)
        self._vocab_size = vocab_size

    @overload
    def __call__(self, hidden: Tensor) -> Tensor: ...

    @overload
    def __call__(self, hidden: Tensor, target: Tensor, **options: Any) -> LinearLogprobs: ...

    @overload
    def __call__(self, hidden: Tensor, target: HeadFn) -> Any: ...

    def __call__(
        self, hidden: Tensor, target: Tensor | HeadFn | None = None, **options: Any
    ) -> Any:
        """Return logits, log-probabilities, or the result of a function.

        Args:
            hidden: (..., D) last hidden states.
            target: selects the result:

                * None: logits.
                * (...) ids: what :func:`grpo_kernels.linear_logprobs` returns; ``options`` are its
                  arguments.
                * a function: its result for the hidden states and the :class:`Head`. Hooks must be
                  able to find the tensors in it, so return a tensor, a tuple, a list, a dict or a
                  ``ModelOutput``.
        """
        # hooks cast, move or count only the hidden states
        if isinstance(target, Tensor):
            ids = target
            return super().__call__(
                hidden, lambda hidden, head: score(hidden, head, ids.to(hidden.device), **options)
            )
        if target is None:
            # LazyLogits do not call the module, so no hook runs before they are scored
            instead = vars(self).get("_instead_of_logits")
            return super().__call__(hidden, **options) if instead is None else instead(self, hidden)
        return super().__call__(hidden, target, **options)

    def policy_loss(
        self, hidden: Tensor, batch: TokenBatch, config: LossConfig, **options: Any
    ) -> PolicyLossOutput:
        """Return the result of :func:`grpo_kernels.linear_policy_loss` with these ``options``."""
        return self(
            hidden, lambda hidden, head: linear_policy_loss(hidden, head, batch, config, **options)
        )

    def divergence(
        self,
        hidden: Tensor,
        teacher_hidden: Tensor | None = None,
        teacher_head: Tensor | Head | None = None,
        **options: Any,
    ) -> LinearDivergence:
        """Return the result of :func:`grpo_kernels.linear_divergence` with these ``options``.

        ``teacher_head`` is the teacher's detached weight, or a :class:`Head` that adds a bias,
        scale or softcap. The weight may be a DTensor. A module isn't supported: it would have to
        be called.
        """
        return self(
            hidden,
            lambda hidden, head: linear_divergence(
                hidden, head, teacher_hidden, teacher_head, **options
            ),
        )

    def forward(self, hidden: Tensor, fn: HeadFn | None = None, **options: Any) -> Any:
        """Return logits, or the result of ``fn`` for hidden states (..., D) and :class:`Head`."""
        if fn is None:
            return super().forward(hidden, **options)
        head = unshard_head(head_of_layer(self, self._transform))
        if self._vocab_size is not None and self._vocab_size < head.weight.shape[0]:
            head = head.columns(slice(self._vocab_size))
        return fn(hidden, head, **options)


def score(hidden: Tensor, head: Head, ids: Tensor, **options: Any) -> LinearLogprobs:
    """Return ``linear_logprobs`` as copies: a view changed in place would lose FSDP2's hooks."""
    outputs = linear_logprobs(hidden, head, ids, **options)
    return LinearLogprobs(*(None if x is None else x.clone() for x in outputs))


def unfuse(head: FusedHead) -> None:
    """Restore the layer's class, unless another library has subclassed it since (as FSDP2 does)."""
    if _swap_class(remove_overlay, head):
        del head._transform, head._vocab_size


def _swap_class(change: Callable[[type[ForwardOverlay], nn.Module], Any], layer: nn.Module) -> Any:
    """Apply or remove FusedHead, also inside accelerate's hooks."""
    inside = getattr(vars(layer).get("_old_forward"), "__func__", None)  # called by these hooks
    hooked = hasattr(layer, "_hf_hook") and inside is type(layer).forward
    if "forward" in vars(layer) and not hooked:
        raise ValueError(
            "layer: expected its class's own forward, or accelerate's hooks around that, got "
            f"{type(layer).__name__} with a patched forward; apply FusedHead before the patch"
        )
    changed = change(FusedHead, layer)
    if hooked:
        vars(layer)["_old_forward"] = MethodType(type(layer).forward, layer)
    return changed
