"""The reference model of the KL penalty: the policy at the start, or a slowly following one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from grpo_kernels.hf import add_fused_head, is_patched
from grpo_trainer.config import GRPOConfig
from grpo_trainer.policy.placement import WHOLE, Placement

_REFERENCE = "ref"  # the adapter that keeps the policy at the start


class Reference(TrainerCallback):
    """Gives a model to run in place of the policy. ``model`` is None if that is no second model."""

    model: PreTrainedModel | None = None

    def prepare(self) -> None:
        """Get ready, once, when the policy is where it will be trained."""

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[nn.Module]:
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs to resume exactly; empty if the start gives all of it.

        Of a sharded reference it is this process's part.
        """
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        assert not state, "only a synced reference has a state"


class FrozenModel(Reference):
    """A copy of the policy with a fused head of its own.

    With ``follows`` it is a callback as well, by which every so many optimizer steps
    ``reference = (1 - alpha) * reference + alpha * policy``, after TR-DPO, arXiv:2404.09656.

    Raises:
        ValueError: the policy's forward is patched. What is attached to a forward stays bound to
            the model it was attached to, so a copy would silently run the policy.
    """

    def __init__(
        self, policy: PreTrainedModel, follows: bool, placement: Placement = WHOLE
    ) -> None:
        if is_patched(policy):
            raise ValueError(
                "model: expected one whose forward is unchanged, so that the reference of beta != "
                "0 can be copied from it; got a patched forward"
            )
        self.model: PreTrainedModel = placement.copied(policy).requires_grad_(False).eval()
        add_fused_head(self.model)
        self._follows = follows
        self._placement = placement
        self._runs: nn.Module = self.model

    def prepare(self) -> None:
        self._runs = self._placement.frozen(self.model)

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[nn.Module]:
        yield self._runs

    @torch.no_grad()
    def on_step_end(
        self, args: GRPOConfig, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if state.global_step % args.ref_model_sync_steps:
            return
        alpha, local = args.ref_model_mixup_alpha, self._placement.local
        for each in (self.model, model):
            self._placement.at_rest(each)
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        for mine, policys in pairs:  # both are sharded alike
            local(mine).mul_(1.0 - alpha).add_(local(policys), alpha=alpha)

    def state(self) -> dict[str, Tensor]:
        if not self._follows:
            return {}
        self._placement.at_rest(self.model)
        own = self.model.named_parameters()
        return {name: self._placement.local(parameter) for name, parameter in own}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        own = self.state()
        assert own.keys() == state.keys(), "a checkpoint of another configuration is refused before"
        for name, parameter in own.items():
            parameter.copy_(state[name])


class Adapter(Reference):
    """The policy itself, under another adapter or, with None, under none."""

    def __init__(self, name: str | None, placement: Placement = WHOLE) -> None:
        self._name = name
        self._placement = placement

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[nn.Module]:
        self._placement.at_rest(policy)  # what is frozen meanwhile is said of the trained ones
        plain = policy.disable_adapter() if self._name is None else nullcontext()
        with _adapters_restored(policy), plain:
            if self._name is not None:
                policy.set_adapter(self._name)
            yield self._placement.runs(policy)
            self._placement.at_rest(policy)


def make_reference(
    policy: PreTrainedModel,
    args: GRPOConfig,
    peft_config: Any | None,
    placement: Placement = WHOLE,
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
        return FrozenModel(policy, args.sync_ref_model, placement)
    if args.sync_ref_model:
        raise ValueError(
            "sync_ref_model: expected False with an adapter (the reference is the model without "
            "it, or a frozen copy of it), got True"
        )
    if peft_config is not None and _starts_as_base(peft_config):
        return Adapter(None, placement)
    _keep_reference_adapter(policy)
    return Adapter(_REFERENCE, placement)


def _starts_as_base(peft_config: Any) -> bool:
    """Return whether a new adapter of this config changes neither base model nor outputs."""
    init = getattr(peft_config, "init_lora_weights", getattr(peft_config, "init_weights", True))
    return init is True or init == "gaussian"


def _keep_reference_adapter(model: PreTrainedModel) -> None:
    """Add a frozen copy of the active adapter, named ``ref``."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    if _REFERENCE in model.peft_config:
        raise ValueError(
            f"model: expected no adapter named {_REFERENCE!r}, which is where the reference of "
            "beta != 0 is kept; delete or rename it"
        )
    [active] = model.active_adapters
    config = copy.deepcopy(model.peft_config[active])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others would alter the base model a second time
    with _adapters_restored(model), torch.random.fork_rng():
        model.add_adapter(_REFERENCE, config)
        state = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
        set_peft_model_state_dict(model, state, adapter_name=_REFERENCE)


@contextmanager
def _adapters_restored(model: Any) -> Iterator[None]:
    """Leave the adapter that is active, and what is trained, as they were.

    Switching makes a whole adapter trainable, whatever was frozen in it.
    """
    active = model.active_adapters
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    try:
        yield
    finally:
        if model.active_adapters != active:
            model.set_adapter(*active)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
