"""Routing replay: tokens go through the experts that the engine chose.

It implements Rollout Routing Replay (R3), arXiv:2510.11370: training uses the engine's choice of
experts. The policy's own router weights them, and gets the gradient of these weights.

A router chooses with ``torch.topk`` of one number per expert. A replay answers that call with the
engine's experts and the policy's numbers for them. Everything that a model family does before and
after the call (softmax, bias, normalization) stays the same, and a policy that would have chosen
the same experts computes the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from grpo_kernels import Head, Metrics
from grpo_kernels.common import ForwardOverlay, apply_overlay
from grpo_kernels.hf import EXPERTS_PER_TOKEN, TOLERANCE
from grpo_kernels.losses import Stat
from grpo_trainer.data import Column, MicroBatch, Sample

NO_EXPERT = -1  # for a token that the policy itself routes
_TOKENS = 6  # of the test row


def add_routing_replay(model: PreTrainedModel) -> None:
    """Add the keyword argument ``routed_experts`` to ``model``; call it before any wrapper is
    applied.

    The argument has (B, L, layers, K) integers: each token's experts in each decoder layer, or -1
    if the model should route it. Layers without experts ignore it. Calling this function twice is
    harmless.

    Raises:
        ValueError: no layer of the model has a known router.
    """
    check_experts(model.config)
    layers = getattr(model.get_decoder(), "layers", [])
    routers = [[x for x in layer.modules() if _is_router(x)] for layer in layers]
    if not any(routers) or max(map(len, routers)) > 1:
        raise _unsupported(model, "no layer with one module of a class named ...Router")
    for number, layer in enumerate(layers):
        for router in routers[number]:
            apply_overlay(_ReplayingRouter, router)
            apply_overlay(_ReplayingLayer, layer)
            layer.number = number
    apply_overlay(_ReplayingModel, model)


def check_experts(config: PretrainedConfig) -> int:
    """Return the number of experts per token; ValueError for a model without experts."""
    text = config.get_text_config()
    for name in EXPERTS_PER_TOKEN:
        if count := getattr(text, name, None):
            return count
    raise ValueError(
        "use_rollout_routing_replay: expected False for a model that is not a mixture of experts, "
        f"got True for a model of type {text.model_type!r}"
    )


def check_routing_replay(model: PreTrainedModel, runs: nn.Module) -> None:
    """Raise ValueError unless the routers of ``model`` can replay given experts.

    It runs three forwards over a few tokens: with the model's own choice; replaying that choice,
    which must give the same hidden states; and with other experts, which must give different ones.

    ``runs`` is the module to call, in evaluation mode: the model or its wrapper.
    """
    routers = {layer.number: _router_of(layer) for layer in _layers(model)}
    shape = (1, _TOKENS, len(model.get_decoder().layers), check_experts(model.config))
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.arange(1, 1 + _TOKENS, device=device)[None]
    replayed = torch.full(shape, NO_EXPERT, device=device)
    hidden: list[Tensor] = []

    def keep(x: Tensor, head: Head) -> Tensor:
        hidden.append(x)
        return x[..., :1]

    def run() -> None:
        mask = torch.ones_like(ids)
        runs(input_ids=ids, attention_mask=mask, head_fn=keep, routed_experts=replayed)

    for router in routers.values():
        router.keeps_own = True
    run()
    for router in routers.values():
        if router.choices != 1:
            kind = type(router).__name__
            raise _unsupported(model, f"{router.choices} calls of topk in a {kind}")
    for number, router in routers.items():
        replayed[0, :, number] = router.own
    run()
    for number, router in routers.items():
        replayed[0, :, number] = (router.own + 1) % router.experts
    run()
    for router in routers.values():
        router.keeps_own, router.own = False, None
    own, same, other = hidden
    allowed = TOLERANCE[own.dtype] * own.abs().max()
    if (same - own).abs().max() > allowed or (other - own).abs().max() <= allowed:
        raise _unsupported(model, "experts that do not follow the router")


def replayed_experts(model: PreTrainedModel) -> Column:
    """Return the column of the experts that the engine reported for each sample.

    ``model`` must have been checked. The model itself routes tokens without a report: the last
    one, which the engine never ran, and all tokens of a sample without a report.
    """

    def column(batch: MicroBatch, policy: nn.Module) -> None:
        assert batch.samples is not None  # columns are running
        sizes = (len(model.get_decoder().layers), check_experts(model.config))
        most = min(_router_of(layer).experts for layer in _layers(model))
        experts = torch.full((*batch.target.shape, *sizes), NO_EXPERT, dtype=torch.int16)
        for row, sample in zip(experts, batch.samples, strict=True):
            if sample.routed_experts is not None:
                reported = _checked(sample, sizes, most)
                row[: len(reported)] = reported
        if batch.owners is not None:
            _complete_owners(experts, batch.owners.cpu().long())
        batch.routed_experts = experts.to(batch.target.device)

    return column


def _complete_owners(
    experts: Tensor,  # (B, L, layers, K), written to
    owners: Tensor,  # (B, L) int64, as in a micro-batch
) -> None:
    """Give a token that represents several rows another row's report if its own row has none: it
    may be the last token of a row that is a prefix of another row."""
    known = (experts != NO_EXPERT).flatten(2).all(2)
    rows, columns = (known & ~known.gather(0, owners)).nonzero(as_tuple=True)
    experts[owners[rows, columns], columns] = experts[rows, columns]


def _checked(sample: Sample, sizes: tuple[int, int], most: int) -> Tensor:
    """Return the experts of a sample; ValueError if they cannot come from the policy."""
    reported, length = sample.routed_experts, len(sample.prompt_ids) + len(sample.completion_ids)
    assert reported is not None
    largest = int(reported.max())
    if reported.shape[1:] != sizes or len(reported) >= length or largest >= most:
        raise ValueError(
            "use_rollout_routing_replay: expected routed_experts of the policy's model, (at most "
            f"{length - 1} tokens, {sizes[0]} layers, {sizes[1]} of {most} experts), got "
            f"{tuple(reported.shape)} with experts up to {largest}"
        )
    return reported


def replay_of(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the arguments with which a model after :func:`add_routing_replay` replays the experts
    of ``batch``, at the places where its tokens run."""
    experts = batch.routed_experts
    if experts is None:
        return {}
    if batch.packed is not None:  # the last element, for padding, is not replayed
        elements = functional.pad(experts.flatten(0, 1), (0, 0, 0, 0, 0, 1), value=NO_EXPERT)
        experts = elements[batch.packed]
    return {"routed_experts": experts}


def routing_metrics(model: nn.Module) -> Metrics:
    """Return the share of replayed choices, in the last forward, that the policy would have made
    differently: another set of experts for a token in a layer."""
    routers = [module for module in model.modules() if isinstance(module, _ReplayingRouter)]
    differ, replayed = torch.stack([router.counts for router in routers]).sum(0)
    return Metrics({"sampling/routing_difference": Stat("mean", differ, replayed)})


class _ReplayingModel(ForwardOverlay):
    """Overlay of :func:`add_routing_replay` for a model."""

    def forward(self: Any, *args: Any, routed_experts: Tensor | None = None, **kwargs: Any) -> Any:
        own_forward = super().forward
        layers = _layers(self)
        for layer in layers:
            layer.replayed = None
            if routed_experts is not None:
                layer.replayed = routed_experts[:, :, layer.number].flatten(0, 1)
        try:
            return own_forward(*args, **kwargs)
        finally:
            for layer in layers:
                layer.replayed = None


class _ReplayingLayer(ForwardOverlay):
    """Overlay for a layer with experts."""

    number: int  # index among the decoder's layers
    replayed: Tensor | None = None  # (N, K) while the model runs

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        own_call: Any = super().__call__  # type: ignore[misc]
        if self.replayed is None:
            return own_call(*args, **kwargs)
        # passed as an argument, which a gradient checkpoint stores for its second run
        return own_call(*args, routed_experts=self.replayed, **kwargs)

    def forward(self: Any, *args: Any, routed_experts: Tensor | None = None, **kwargs: Any) -> Any:
        own_forward = super().forward
        router = _router_of(self)
        router.replayed = routed_experts
        try:
            return own_forward(*args, **kwargs)
        finally:  # a checkpoint ends its second run with an exception
            router.replayed = None


class _ReplayingRouter(ForwardOverlay):
    """Overlay for a router, with data about its last run."""

    replayed: Tensor | None = None  # (N, K) while its layer runs
    keeps_own = False  # True during the check
    own: Tensor | None = None  # (N, K) its own choice
    counts: Tensor  # (2,) fp64: choices that differ, and all replayed choices
    choices = 0  # calls of topk that chose experts
    experts = 0  # number of experts to choose from

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own_forward = super().forward
        if self.replayed is None:
            return own_forward(*args, **kwargs)
        with _Choice(self.replayed) as choice:
            output = own_forward(*args, **kwargs)
        self.choices, self.experts = choice.calls, choice.experts
        if self.keeps_own:
            self.own = choice.own
        if choice.own is not None:
            self.counts = _counts(choice.own, self.replayed)
        return output


class _Choice(TorchFunctionMode):
    """Answers ``torch.topk`` of (N, experts) numbers for K with ``replayed`` experts, (N, K)."""

    def __init__(self, replayed: Tensor) -> None:
        super().__init__()
        self.calls = self.experts = 0
        self.own: Tensor | None = None
        self._replayed = replayed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or output.indices.shape != self._replayed.shape:
            return output
        self.calls, self.own, self.experts = self.calls + 1, output.indices, args[0].shape[-1]
        chosen = self._replayed.to(output.indices)
        chosen = torch.where(chosen == NO_EXPERT, output.indices, chosen)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def _counts(own: Tensor, replayed: Tensor) -> Tensor:  # (2,) fp64
    there = replayed[:, 0] != NO_EXPERT
    others = (own.sort().values != replayed.to(own).sort().values).any(-1)
    return torch.stack([(there & others).sum(), there.sum()]).double()


def _layers(model: PreTrainedModel) -> list[Any]:
    return [layer for layer in model.get_decoder().layers if isinstance(layer, _ReplayingLayer)]


def _router_of(layer: nn.Module) -> Any:
    return next(x for x in layer.modules() if isinstance(x, _ReplayingRouter))


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router")


def _unsupported(model: PreTrainedModel, got: str) -> ValueError:
    return ValueError(
        "use_rollout_routing_replay: expected a model whose routers choose experts with one call "
        f"of torch.topk, got {got} in {type(model).__name__}; set it to False"
    )
