"""Forward passes of a model with :func:`grpo_kernels.hf.add_fused_head`: the policy, and the
reference of the KL penalty."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, TrainerCallback

from grpo_kernels import Head, LossConfig, Metrics, TokenBatch, linear_logprobs, linear_policy_loss
from grpo_kernels.fused_head import HeadFn
from grpo_kernels.hf import add_fused_head, is_patched
from grpo_kernels.losses import Stat
from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import LossAndMetrics, MicroBatch, Term
from grpo_trainer.policy.placement import Placement
from grpo_trainer.policy.routing import replay_of, routing_metrics

_REFERENCE = "ref"  # the adapter that holds the initial policy


def policy_loss_of(
    model: nn.Module,
    batch: MicroBatch,
    tokens: TokenBatch,
    config: LossConfig,
    options: dict[str, Any],
    *,
    terms: Sequence[Term] = (),
    policy: nn.Module | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the policy loss of ``batch`` with ``tokens``, plus the losses of ``terms``, and
    metrics.

    ``options`` are arguments of ``linear_policy_loss``; ``policy`` is ``model`` without wrappers.
    """
    on_head = [term.on_head(batch, model if policy is None else policy) for term in terms]
    # packed rows are not padded again if only the loss reads them
    padded = batch.packed is None or any(loss_of is not None for loss_of in on_head)
    rows = None if padded else tokens.rows
    if rows is not None:
        tokens = replace(tokens, rows=None, layout=torch.tensor([tokens.num_tokens]))
    metrics: list[Metrics] = []

    def added(term: Term, output: Any) -> Tensor:
        if not isinstance(output, tuple) or [type(part) for part in output[1:]] != [Metrics]:
            raise ValueError(
                f"terms: expected a loss and Metrics from {type(term).__name__}, got "
                f"{shortened(output)}"
            )
        metrics.append(output[1])
        return output[0] / tokens.gradient_accumulation_steps

    def head_fn(hidden: Tensor, head: Head) -> Tensor:
        loss, of_loss = linear_policy_loss(hidden, head, tokens, config, **options)
        metrics.append(_per_micro_step(of_loss, batch.share))
        for term, loss_of in zip(terms, on_head, strict=True):
            if loss_of is not None:
                loss = loss + added(term, loss_of(hidden, head))
        return loss

    more: dict[str, Any] = {}
    for term in terms:
        more |= term.forward_options
    output = run(model, batch, head_fn, rows, **replay_of(batch), **more)
    loss = output.head
    for term in terms:
        if (of_output := term.on_output(batch, output)) is not None:
            loss = loss + added(term, of_output)
    if batch.routed_experts is not None:
        metrics.append(routing_metrics(model))
    return loss, metrics[0] if len(metrics) == 1 else Metrics.merge(metrics)


def _per_micro_step(metrics: Metrics, share: float) -> Metrics:
    """Count the loss of a micro-batch as ``share`` of a sample: there is one per micro-step."""
    loss = metrics.stats.get("policy_loss")
    if share == 1 or loss is None:
        return metrics
    return Metrics({**metrics.stats, "policy_loss": replace(loss, count=loss.count * share)})


@dataclass(frozen=True)
class RouterLoss(Term):
    """The load-balancing loss of a mixture-of-experts model, over the tokens of a micro-batch."""

    coef: float
    forward_options = MappingProxyType({"output_router_logits": True})

    def on_output(self, batch: MicroBatch, output: Any) -> LossAndMetrics:
        value = output.aux_loss.detach().double()
        logged = Metrics({"aux_loss": Stat("mean", value, torch.ones_like(value))})
        return self.coef * batch.share * output.aux_loss, logged


def target_logprobs(
    model: nn.Module,
    batch: MicroBatch,
    temperature: float,
    vocab_size: int | None = None,
    *,
    replays_routing: bool = False,
) -> Tensor:
    """Return log-probabilities of the batch's targets, (B, L), without dropout or gradient.

    With sampling masks they are normalized over the masks' ids, as in the loss. The head's rows
    from ``vocab_size`` on are padding without probability; None: all rows are in use.
    ``replays_routing``: use the batch's ``routed_experts``, if it has them.
    """
    output = "logprobs" if batch.sampling_mask is None else "masked_logprobs"

    def head_fn(hidden: Tensor, head: Head) -> Tensor:
        outputs = linear_logprobs(
            hidden,
            head if vocab_size is None else head.columns(slice(vocab_size)),
            batch.target,
            temperature=temperature,
            outputs=(output,),
            sampling_mask=batch.sampling_mask,
        )
        logprobs: Tensor = getattr(outputs, output)
        return logprobs

    with evaluating(model):
        more = replay_of(batch) if replays_routing else {}
        return run(model, batch, head_fn, **more).head


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run ``model`` without dropout and gradients; afterward its mode is restored."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def run(
    model: nn.Module,
    batch: MicroBatch,
    head_fn: HeadFn,
    rows: Tensor | None = None,  # (T,) int64
    **options: Any,
) -> Any:
    """Return a model's output for a batch, with ``head_fn`` in place of its head.

    The body runs without padding if the batch is ``packed``, and only once on shared prefixes if
    it has ``owners``.

    ``head_fn`` gets the hidden states, (B, L, D), at the places of padded rows, with arbitrary
    finite values at padding. For a ``packed`` batch with ``rows`` it gets the hidden states of
    these elements out of B * L, (T, D).
    """
    if batch.packed is None:
        inputs = {"attention_mask": batch.attention_mask, **batch.inputs}
        return model(input_ids=batch.input_ids, head_fn=head_fn, **inputs, **options)
    packed, width = batch.packed, batch.input_ids.shape[1]
    places = _places(batch) if rows is None else _places(batch).flatten()[rows]
    elements = functional.pad(batch.input_ids.flatten(), (0, 1))  # the last one pads rows
    inputs = {} if batch.owners is None else {"attention_mask": _mask_of_shared(batch)}

    def of_padded(hidden: Tensor, head: Head) -> Tensor:
        return head_fn(hidden.flatten(0, 1)[places], head)

    return model(
        input_ids=elements[packed],
        position_ids=packed % width,
        **inputs,
        head_fn=of_padded,
        router_mask=(packed < batch.input_ids.numel()).long(),
        **options,
    )


def _places(batch: MicroBatch) -> Tensor:  # (B, L) int64
    """Return the packed place of each element of padded rows; arbitrary for padding."""
    assert batch.packed is not None
    elements, device = batch.input_ids.numel(), batch.packed.device
    places = torch.zeros(elements + 1, dtype=torch.int64, device=device)
    places[batch.packed.flatten()] = torch.arange(batch.packed.numel(), device=device)
    places = places[:-1].view(batch.input_ids.shape)
    return places if batch.owners is None else places.gather(0, batch.owners.long())


def _mask_of_shared(batch: MicroBatch) -> Tensor:  # (R, 1, W, W) bool
    """Return which tokens see which: each token sees all earlier tokens of its row, shared or
    not."""
    assert batch.packed is not None and batch.owners is not None
    count, width = batch.input_ids.shape
    row, position = batch.packed // width, batch.packed % width
    owners = functional.pad(batch.owners, (0, 0, 0, 1), value=count)  # padding counts as a row, too
    seen = owners[row[:, :, None], position[:, None, :]] == row[:, None, :]
    return (seen & (position[:, None, :] <= position[:, :, None]))[:, None]


class Reference(TrainerCallback):
    """Provides the reference: a second model, or the policy itself under another adapter or, with
    None, without an adapter.

    With ``sync_ref_model`` it is also a callback that, every ``ref_model_sync_steps`` optimizer
    steps, sets ``reference = (1 - alpha) * reference + alpha * policy`` (TR-DPO,
    arXiv:2404.09656).
    """

    def __init__(
        self,
        placement: Placement,
        model: PreTrainedModel | None = None,
        adapter: str | None = None,
        follows: bool = False,
    ) -> None:
        self.model = model
        self._adapter = adapter
        self._follows = follows
        self._placement = placement
        self._runs = None if model is None else placement.frozen(model)

    @contextmanager
    def running(self, policy: PreTrainedModel) -> Iterator[nn.Module]:
        if self._runs is not None:
            yield self._runs
            return
        self._placement.at_rest(policy)  # so that freezing applies to the trained parameters
        plain = policy.disable_adapter() if self._adapter is None else nullcontext()
        with _adapters_restored(policy), plain:
            if self._adapter is not None:
                policy.set_adapter(self._adapter)
            yield self._placement.runs(policy)
            self._placement.at_rest(policy)

    @torch.no_grad()
    def on_step_end(
        self, args: GRPOConfig, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if state.global_step % args.ref_model_sync_steps:
            return
        alpha, local = args.ref_model_mixup_alpha, self._placement.local
        assert self.model is not None  # the model that follows the policy
        for each in (self.model, model):
            self._placement.at_rest(each)
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        for mine, policys in pairs:  # both are sharded the same way
            local(mine).mul_(1.0 - alpha).add_(local(policys), alpha=alpha)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs to resume exactly; empty if a new start recreates it.

        For a sharded reference it is this process's part.
        """
        if self.model is None or not self._follows:
            return {}
        self._placement.at_rest(self.model)
        own = self.model.named_parameters()
        return {name: self._placement.local(parameter) for name, parameter in own}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        own = self.state()
        assert own.keys() == state.keys(), "checkpoints of other configurations fail earlier"
        for name, parameter in own.items():
            parameter.copy_(state[name])


def make_reference(
    policy: PreTrainedModel, args: GRPOConfig, peft_config: Any | None, placement: Placement
) -> Reference | None:
    """Return the reference of the current ``policy``, or None with beta 0.

    With a new adapter (``peft_config``), the reference is the model without the adapter; if the
    adapter came with the model, it is a frozen copy of the adapter. Neither needs a second model.
    Otherwise it is a copy of the model with its own fused head.

    Raises:
        ValueError: ``sync_ref_model`` with an adapter, or the policy cannot be copied.
    """
    if args.beta == 0:
        return None
    if not is_peft_model(policy):
        if is_patched(policy):  # a patched forward stays bound to its model
            raise ValueError(
                "model: expected a model with an unchanged forward, since beta != 0 copies it for "
                "the reference, got a patched forward"
            )
        model: Any = placement.copied(policy).requires_grad_(False).eval()
        add_fused_head(model)
        return Reference(placement, model, follows=args.sync_ref_model)
    if args.sync_ref_model:
        raise ValueError(
            "sync_ref_model: expected False with an adapter (the reference is the model without "
            "it, or a frozen copy of it), got True"
        )
    # whether a new adapter leaves base model and outputs unchanged
    init = getattr(peft_config, "init_lora_weights", getattr(peft_config, "init_weights", True))
    if peft_config is not None and (init is True or init == "gaussian"):
        return Reference(placement)
    _keep_reference_adapter(policy)
    return Reference(placement, adapter=_REFERENCE)


def _keep_reference_adapter(model: PreTrainedModel) -> None:
    """Add a frozen copy of the active adapter, named ``ref``."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    if _REFERENCE in model.peft_config:
        raise ValueError(
            f"model: expected no adapter named {_REFERENCE!r}, since beta != 0 stores the "
            "reference under that name; delete or rename it"
        )
    [active] = model.active_adapters
    config = copy.deepcopy(model.peft_config[active])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # other values would change the base model again
    with _adapters_restored(model), torch.random.fork_rng():
        model.add_adapter(_REFERENCE, config)
        state = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
        set_peft_model_state_dict(model, state, adapter_name=_REFERENCE)


@contextmanager
def _adapters_restored(model: Any) -> Iterator[None]:
    """Restore the active adapter, and which parameters are trained.

    Switching makes a whole adapter trainable, including its frozen parts.
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
