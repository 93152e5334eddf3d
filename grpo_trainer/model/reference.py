"""The reference model of the KL penalty: the policy at the start, or a slowly following one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from grpo_kernels.hf import add_fused_head
from grpo_trainer.config import GRPOConfig
from grpo_trainer.model.adapters import (
    REFERENCE,
    keep_reference_adapter,
    running_adapter,
    starts_as_base,
)


class Reference:
    """Gives a model to run in place of the policy. ``model`` is None if that is no second model."""

    model: PreTrainedModel | None = None

    def prepare(self, accelerator: Accelerator) -> None:
        """Get ready, once, when the policy is where it will be trained."""

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[PreTrainedModel]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs to resume exactly; empty if the start gives all of it."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state, "only a synced reference has a state"


class FrozenModel(Reference):
    """A copy of the policy with a fused head of its own. With ``follows`` it is mixed with the
    policy by the trainer.

    Raises:
        ValueError: the policy has a fused head already. What is attached to a forward stays bound
            to the model it was attached to, so a copy would silently run the policy.
    """

    def __init__(self, policy: PreTrainedModel, follows: bool) -> None:
        if "forward" in vars(policy):
            raise ValueError(
                "model: expected one whose forward is unchanged, so that the reference of beta != "
                "0 can be copied from it; got a patched forward (was it used by a trainer before?)"
            )
        self.model: PreTrainedModel = copy.deepcopy(policy).requires_grad_(False).eval()
        add_fused_head(self.model)
        self._follows = follows

    def prepare(self, accelerator: Accelerator) -> None:
        self.model = accelerator.prepare_model(self.model, evaluation_mode=True)

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[PreTrainedModel]:
        yield self.model

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) if self._follows else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        own = self.state_dict()
        assert own.keys() == state.keys(), "a checkpoint of another configuration is refused before"
        for name, parameter in own.items():
            parameter.copy_(state[name])


class Adapter(Reference):
    """The policy itself, under another adapter or, with None, under none."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[PreTrainedModel]:
        with running_adapter(policy, self._name):
            yield policy


class SyncReference(TrainerCallback):
    """Every so many optimizer steps ``reference = (1 - alpha) * reference + alpha * policy``.

    After TR-DPO, arXiv:2404.09656.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    @torch.no_grad()
    def on_step_end(
        self, args: GRPOConfig, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if state.global_step % args.ref_model_sync_steps:
            return
        assert self._reference.model is not None  # checked by make_reference
        alpha = args.ref_model_mixup_alpha
        pairs = zip(self._reference.model.parameters(), model.parameters(), strict=True)
        for mine, policys in pairs:
            mine.mul_(1.0 - alpha).add_(policys, alpha=alpha)


def make_reference(
    policy: PreTrainedModel, args: GRPOConfig, peft_config: Any | None
) -> Reference | None:
    """Return the reference of ``policy`` as it is now; None with beta 0, which needs none.

    A new adapter of ``peft_config`` is switched off, an adapter that came with the model is kept as
    a frozen copy; neither needs a second model.

    Raises:
        ValueError: ``sync_ref_model`` with an adapter, or the policy cannot be copied.
    """
    if args.beta == 0:
        return None
    if not is_peft_model(policy):
        return FrozenModel(policy, args.sync_ref_model)
    if args.sync_ref_model:
        raise ValueError(
            "sync_ref_model: expected False with an adapter (the reference is the model without "
            "it, or a frozen copy of it), got True"
        )
    if peft_config is not None and starts_as_base(peft_config):
        return Adapter(None)
    keep_reference_adapter(policy)
    return Adapter(REFERENCE)
