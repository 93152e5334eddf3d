"""The product run on a case: every way in, every option."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

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
    linear_divergence,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
)
from grpo_kernels.testing import poisoned_allocations
from tests.net.cases import Case
from tests.net.problem import IGNORED, Problem, trained_names
from tests.net.ranks import SequenceRanks, VocabRanks, on_ranks
from tests.net.results import SCALE, Found, bits, objective_of
from tests.support.memory import checkpointed, offloaded

Rows = slice | Tensor
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
    posed = problem.posed(names, device=case.device)
    buffer = _main_grad(case, posed)
    shared = {} if ranks is None else ranks.options(posed)
    tensors = posed.leaves | {f"teacher_{name}": x for name, x in posed.teacher.items()}

    def call(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        leaves = {name: tensors[name] for name in posed.leaves}
        teacher = {name: tensors[f"teacher_{name}"] for name in posed.teacher}
        return _call(case, replace(posed, leaves=leaves, teacher=teacher), buffer, shared)

    with autocast(case):
        if case.twist == "offload":
            values, objective = offloaded(call, tensors)
        elif case.twist == "checkpoint" and buffer is None:
            values, objective = checkpointed(call, tensors)
        else:
            values, objective = _call(case, posed, buffer, shared)
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
    return Found(
        {name: x.detach().cpu() for name, x in values.items()},
        {name: x.cpu() for name, x in gradients.items()},
    )


def _main_grad(case: Case, posed: Problem) -> Tensor | None:
    if not case.main_grad:
        return None
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    return torch.zeros(posed.leaves["weight"].shape, dtype=wide, device=case.device)


def _call(
    case: Case, posed: Problem, buffer: Tensor | None, shared: dict[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values by name, and what is to be differentiated."""
    if not case.of_loss:
        return of_rows(case, posed, shared=shared)
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
    )
    if case.divergence:  # whose workspace is that of both models
        return found | dict(max_workspace_bytes=size and size * (1 if case.top_k else 2))
    found["activation_bytes"] = case.activation_bytes
    if case.bounded:
        found["backward"] = Bounded(tolerance=TOLERANCE, exact_weight=case.seed % 2 == 0)
    if case.of_loss:
        found |= dict(schedule=case.schedule, metric_rows=case.metric_rows)
    return found


def _lora(case: Case, posed: Problem) -> HeadLoRA | None:
    if not case.lora:
        return None
    return HeadLoRA(a=posed.leaves["a"], b=posed.leaves["b"], scaling=case.scaling)


def head_of(case: Case, posed: Problem, shard: VocabShard | None = None) -> Head:
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


def sampling_mask_of(members: Tensor | None) -> SamplingMask | None:
    if members is None:
        return None
    ids = [row.nonzero()[:, 0].tolist() for row in members]
    return SamplingMask.from_lists(ids, device=members.device)


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
    prompts = torch.tensor(x.prompt_tokens, device=posed.target.device)
    return fields | dict(sampling_mask=sampling_mask_of(posed.members), prompt_tokens=prompts)


def _batch(case: Case, posed: Problem, **more: Any) -> TokenBatch:
    given, fields = (posed.target, posed.advantages), _fields(posed) | more
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
    batch, config = _batch(case, posed, **group), LossConfig(**settings)
    if _by_layer(case):
        return _layer(case, posed).policy_loss(hidden, batch, config, **options)
    if case.entry == "composed":
        name = "masked_logprobs" if case.sampling_mask else "logprobs"
        found = linear_logprobs(
            hidden,
            head_of(case, posed),
            posed.target.masked_fill(~posed.mask, IGNORED),
            temperature=config.temperature,
            outputs=(name, "entropy"),
            sampling_mask=sampling_mask_of(posed.members),
            **{n: x for n, x in options.items() if n not in ("schedule", "metric_rows")},
        )
        return policy_loss(getattr(found, name), batch, config, found.entropy)
    shard = shared.get("vocab_shard")
    function = _entry(case, linear_policy_loss)
    return function(hidden, head_of(case, posed, shard), batch, config, **options)


def of_rows(
    case: Case, posed: Problem, rows: Rows = slice(None), shared: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of some packed rows, and what is to be differentiated."""
    call = _divergence if case.divergence else _logprobs
    return call(case, posed, rows, (shared or {}).get("vocab_shard"))


def _temperature(case: Case, posed: Problem, rows: Rows) -> float | Tensor:
    if not case.row_temperature:
        return posed.temperature
    ones = torch.ones(posed.target.shape, device=posed.target.device)
    return ones.masked_scatter(posed.mask, posed.temperature)[rows]


def _divergence(
    case: Case, posed: Problem, rows: Rows, shard: VocabShard | None
) -> tuple[dict[str, Tensor], Tensor]:
    x = posed.teacher
    teacher: dict[str, Any]
    if case.top_k:
        teacher = {"teacher_topk": (x["topk_logprobs"][rows], x["topk_indices"][rows])}
    else:
        head = Head(x["weight"], x.get("bias"), shard=shard)
        teacher = {"teacher_hidden": x["hidden"][rows], "teacher_head": head}
    out = linear_divergence(
        posed.leaves["hidden"][rows],
        head_of(case, posed, shard),
        **teacher,
        kind=case.divergence,
        beta=case.beta,
        temperature=_temperature(case, posed, rows),
        weights=posed.advantages[rows] if case.advantages == "token" else None,
        mask=posed.mask[rows] if case.masked else None,
        **_options(case),
    )
    keep = posed.keep[rows]
    for name in ("divergence", "entropy"):
        assert not getattr(out, name)[~keep].any(), f"{name}: expected 0 outside of the mask"
        assert not getattr(out, name).requires_grad, f"{name}: expected no gradient"
    values = {name: getattr(out, name)[keep] for name in ("divergence", "entropy")}
    return {"loss": out.loss, **values}, out.loss


def _logprobs(
    case: Case, posed: Problem, rows: Rows, shard: VocabShard | None
) -> tuple[dict[str, Tensor], Tensor]:
    target = posed.target.masked_fill(~posed.mask, IGNORED)[rows]
    options = dict(
        outputs=case.outputs,
        temperature=_temperature(case, posed, rows),
        top_k=min(5, case.vocab) if any("topk" in name for name in case.outputs) else None,
        sampling_mask=None if posed.members is None else sampling_mask_of(posed.members[rows]),
        **_options(case),
    )
    hidden = posed.leaves["hidden"][rows]
    if _by_layer(case):
        out = _layer(case, posed)(hidden, target, **options)
    else:
        function = _entry(case, linear_logprobs)
        out = function(hidden, head_of(case, posed, shard), target, **options)
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
    if not case.autocast:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(case.device).type, torch.bfloat16)
