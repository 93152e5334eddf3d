"""The product run on a case: every way in, every option."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_kernels import (
    Bounded,
    FusedHead,
    FusedLinearGRPOLoss,
    Head,
    HeadLoRA,
    LossConfig,
    SamplingMask,
    TokenBatch,
    Transform,
    VocabShard,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
)
from grpo_kernels.testing import poisoned_allocations
from tests.net.cases import Case
from tests.net.problem import IGNORED, Problem, trained_names
from tests.net.ranks import SequenceRanks, VocabRanks, on_ranks
from tests.net.results import SCALE, Found, bits, objective_of
from tests.support.memory import offloaded

TOLERANCE = 2e-2  # of a bounded backward


def run(case: Case, problem: Problem) -> Found:
    """Run the product forward and backward on fresh leaves, on one rank or several."""
    if case.ranks == 1:
        return _run(case, problem)
    kind = VocabRanks if case.shared == "vocab" else SequenceRanks
    ranks = kind(case, problem)

    def on_rank(rank: int) -> Found:
        with poisoned_allocations():
            return _run(replace(case, ranks=1), ranks.part(rank), ranks)

    return ranks.join(on_ranks(case.ranks, on_rank))


def _run(case: Case, problem: Problem, ranks: VocabRanks | SequenceRanks | None = None) -> Found:
    names = trained_names(case)
    posed = problem.posed(names)
    buffer = _main_grad(case, posed)
    shared = {} if ranks is None else ranks.options(posed)
    computed = case.twist == "offload"
    memory = offloaded(posed.leaves) if computed else contextlib.nullcontext(posed.leaves)
    with autocast(case), memory as leaves:
        values, objective = _call(case, replace(posed, leaves=leaves), buffer, shared)
    gradients = {}
    if names and objective.requires_grad:
        leaves = [posed.leaves[name] for name in names]
        found = torch.autograd.grad(objective * SCALE, leaves, allow_unused=True, retain_graph=True)
        gradients = {n: x for n, x in zip(names, found, strict=True) if x is not None}
        if case.twist == "second_backward":
            again = torch.autograd.grad(objective * SCALE, leaves, allow_unused=True)
            for name, x in zip(names, again, strict=True):
                assert x is None or torch.equal(bits(x), bits(gradients[name])), name
            if buffer is not None:
                buffer /= 2
    if buffer is not None:
        gradients["weight"] = buffer
    return Found({name: x.detach() for name, x in values.items()}, gradients)


def _main_grad(case: Case, posed: Problem) -> Tensor | None:
    if not case.main_grad:
        return None
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    return torch.zeros(posed.leaves["weight"].shape, dtype=wide)


def _call(
    case: Case, posed: Problem, buffer: Tensor | None, shared: dict[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values by name, and what is to be differentiated."""
    if case.outputs:
        return logprobs(case, posed, shared=shared)
    if case.twist == "checkpoint" and buffer is None:
        kept: dict[str, Tensor] = {}

        def function(*leaves: Tensor) -> Tensor:
            again = replace(posed, leaves=dict(zip(posed.leaves, leaves, strict=True)))
            out = _loss(case, again, None, shared)
            kept.update(out.metrics.items())
            return out.loss

        loss = checkpoint(function, *posed.leaves.values(), use_reentrant=False)
        return {"loss": loss} | kept, loss
    out = _loss(case, posed, buffer, shared)
    return {"loss": out.loss} | dict(out.metrics.items()), out.loss


def _options(case: Case) -> dict[str, Any]:
    itemsize = 8 if case.dtype == "float64" else 4
    size = case.tile_rows and case.tile_rows * case.vocab * itemsize
    found: dict[str, Any] = dict(
        precision=case.precision,
        backend=case.backend,
        max_workspace_bytes=size,
        batch_invariant=case.batch_invariant,
        activation_bytes=case.activation_bytes,
    )
    if case.bounded:
        found["backward"] = Bounded(tolerance=TOLERANCE, exact_weight=case.seed % 2 == 0)
    if case.of_loss:
        found |= dict(schedule=case.schedule, metric_rows=case.metric_rows)
    return found


def _lora(case: Case, posed: Problem) -> HeadLoRA | None:
    if not case.lora:
        return None
    return HeadLoRA(a=posed.leaves["a"], b=posed.leaves["b"], scaling=0.75)


def _head(case: Case, posed: Problem, shard: VocabShard | None = None) -> Head:
    transform = Transform(case.logit_scale, case.softcap)
    leaves = posed.leaves
    return Head(leaves["weight"], leaves.get("bias"), transform, _lora(case, posed), shard)


def _by_layer(case: Case) -> bool:
    plain = not case.lora and not case.tied and case.twist not in ("checkpoint", "offload")
    return plain and case.entry == "fused_head"


def _layer(case: Case, posed: Problem) -> FusedHead:
    """Return a FusedHead whose parameters are the leaves."""
    layer = nn.Linear(1, 1, bias=case.bias)
    for name in ("weight", "bias"):
        if name in posed.leaves:
            parameter = nn.Parameter(posed.leaves[name].detach())
            parameter.requires_grad_(posed.leaves[name].requires_grad)
            setattr(layer, name, parameter)
            posed.leaves[name] = parameter
    return FusedHead(layer, logit_scale=case.logit_scale, softcap=case.softcap)


def _sampling_mask(members: Tensor | None) -> SamplingMask | None:
    if members is None:
        return None
    return SamplingMask.from_lists([row.nonzero()[:, 0].tolist() for row in members])


def _fields(posed: Problem) -> dict[str, Any]:
    x, fields = posed.rollout, dict(posed.fields)
    if x.num_items is not None:
        fields |= dict(
            num_items_in_batch=x.num_items,
            num_tokens_in_micro_batch=x.num_tokens,
            num_sequences_in_micro_batch=x.num_sequences,
            entropy_scale=x.entropy_scale,
            num_prompts=x.num_prompts,
            gradient_accumulation_steps=x.steps,
        )
    assert x.prompt_tokens is not None
    prompts = torch.tensor(x.prompt_tokens)
    return fields | dict(sampling_mask=_sampling_mask(posed.members), prompt_tokens=prompts)


def _batch(case: Case, posed: Problem, group: dict[str, Any]) -> TokenBatch:
    given, fields = (posed.target, posed.advantages), _fields(posed) | group
    if case.packed:
        return TokenBatch.from_packed(*given, posed.cu_seqlens, posed.mask, **fields)
    return TokenBatch.from_padded(*given, posed.mask, **fields)


def _loss(case: Case, posed: Problem, buffer: Tensor | None, shared: dict[str, Any]) -> Any:
    hidden, options = posed.leaves["hidden"], _options(case)
    if buffer is not None:
        options["main_grad"] = buffer
    head = dict(logit_scale=case.logit_scale, softcap=case.softcap)
    settings = dict(loss_type=case.loss_type, **case.settings)
    if case.entry == "module":
        of_call = ("main_grad",)
        module = FusedLinearGRPOLoss(
            **settings, **head, **{n: x for n, x in options.items() if n not in of_call}
        )
        return module(
            hidden,
            posed.leaves["weight"],
            posed.target,
            posed.advantages,
            posed.mask,
            cu_seqlens=posed.cu_seqlens if case.packed else None,
            bias=posed.leaves.get("bias"),
            lora=_lora(case, posed),
            **{n: x for n, x in options.items() if n in of_call},
            **_fields(posed),
        )
    group = {n: x for n, x in shared.items() if n == "sequence_group"}
    batch, config = _batch(case, posed, group), LossConfig(**settings)
    if _by_layer(case):
        return _layer(case, posed).policy_loss(hidden, batch, config, **options)
    if case.entry == "composed":
        name = "masked_logprobs" if case.sampling_mask else "logprobs"
        found = linear_logprobs(
            hidden,
            _head(case, posed),
            posed.target.masked_fill(~posed.mask, IGNORED),
            temperature=config.temperature,
            outputs=(name, "entropy"),
            sampling_mask=_sampling_mask(posed.members),
            **{n: x for n, x in options.items() if n not in ("schedule", "metric_rows")},
        )
        return policy_loss(getattr(found, name), batch, config, found.entropy)
    shard = shared.get("vocab_shard")
    function = _entry(case, linear_policy_loss)
    return function(hidden, _head(case, posed, shard), batch, config, **options)


def logprobs(
    case: Case, posed: Problem, rows: slice = slice(None), shared: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    target = posed.target.masked_fill(~posed.mask, IGNORED)[rows]
    temperature: Any = posed.temperature
    if case.row_temperature:
        temperature = torch.ones(posed.target.shape).masked_scatter(posed.mask, temperature)[rows]
    options = dict(
        outputs=case.outputs,
        temperature=temperature,
        top_k=min(5, case.vocab) if any("topk" in name for name in case.outputs) else None,
        sampling_mask=None if posed.members is None else _sampling_mask(posed.members[rows]),
        **_options(case),
    )
    hidden = posed.leaves["hidden"][rows]
    if _by_layer(case):
        out = _layer(case, posed)(hidden, target, **options)
    else:
        shard = (shared or {}).get("vocab_shard")
        function = _entry(case, linear_logprobs)
        out = function(hidden, _head(case, posed, shard), target, **options)
    keep = posed.keep[rows]
    values = {name: getattr(out, name)[keep] for name in case.outputs}
    for name in ("logprobs", "entropy", "masked_logprobs"):
        if name in case.outputs:
            assert not getattr(out, name)[~keep].any(), f"{name}: expected 0 without a target"
    return values, objective_of(values)


def _entry(case: Case, function: Callable) -> Callable:
    """Return a function of the library as the case calls it: compiled, as one graph."""
    if not case.compiled:
        return function
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def autocast(case: Case) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
