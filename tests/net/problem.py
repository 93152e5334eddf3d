"""The tensors of a case, made of its seed. Nothing of the product is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.net.cases import Case
from tests.net.oracle import LinearHead, Rollout, statistics

IGNORED = -100
_SPREAD = {"peaked": 12.0, "certain": 200.0, "flat": 0.0}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case's tensors, in the caller's layout: (B, L, ...) or packed (T0, ...)."""

    leaves: dict[str, Tensor]  # hidden, weight, bias, a, b: those that there are
    target: Tensor
    mask: Tensor | None
    advantages: Tensor
    fields: dict[str, Tensor]  # old_logprobs, ref_logprobs, ..., in the layout of target
    cu_seqlens: Tensor  # of all tokens
    keep: Tensor  # (T0,) bool, which of the flattened tokens count
    members: Tensor | None  # (T0, V) bool, the sampling mask
    rollout: Rollout  # of the valid tokens
    temperature: float | Tensor
    embedded: Tensor | None = None  # ids whose rows of the weight are the hidden states
    # of a divergence: hidden, weight and bias, or topk_logprobs and topk_indices
    teacher: dict[str, Tensor] = field(default_factory=dict)

    def head(self, case: Case) -> LinearHead:
        """Return the oracle's head of the leaves."""
        leaves = self.leaves
        lora = (leaves["a"], leaves["b"], case.scaling) if case.lora else None
        return LinearHead(
            weight=leaves["weight"],
            bias=leaves.get("bias"),
            lora=lora,
            logit_scale=case.logit_scale,
            softcap=case.softcap,
            temperature=self.temperature,
        )

    def teacher_scores(
        self, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None
    ) -> Tensor:
        """Return the (T, V) scores of the teacher's valid rows."""
        head = LinearHead(
            weight=self.teacher["weight"],
            bias=self.teacher.get("bias"),
            temperature=self.temperature,
        )
        return head.scores(self.rows(self.teacher["hidden"]), dtype, rounded)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the (T, D) rows of valid tokens."""
        return hidden.reshape(-1, hidden.shape[-1])[self.keep]

    def posed(
        self,
        names: tuple[str, ...],
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> Problem:
        """Return the same with fresh leaves, of which those named need a gradient."""
        moved = {f.name: _moved(getattr(self, f.name), device) for f in fields(self)}
        leaves = {
            name: _leaf(x, dtype or x.dtype, device).requires_grad_(name in names)
            for name, x in self.leaves.items()
        }
        if self.embedded is not None:
            leaves["hidden"] = leaves["weight"][moved["embedded"]]
        return Problem(**moved | {"leaves": leaves})


def _leaf(x: Tensor, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    strided = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    return strided.copy_(x.detach())


def _moved(x: Any, device: str | torch.device) -> Any:
    if isinstance(x, dict):
        return {name: _moved(value, device) for name, value in x.items()}
    return x.to(device) if isinstance(x, Tensor) else x


def trained_names(case: Case) -> tuple[str, ...]:
    """Return the names of the leaves that get a gradient."""
    there = ["weight", *["bias"] * case.bias, *["a", "b"] * bool(case.lora)]
    if not case.tied:
        there.insert(0, "hidden")
    named = {"head": ("weight", "bias", "a", "b"), "lora": ("hidden", "a", "b")}
    wanted = there if case.trained == "all" else named.get(case.trained, (case.trained,))
    return tuple(name for name in there if name in wanted)


def make_problem(case: Case) -> Problem:
    """Make the tensors of a case; they hold values of its dtype exactly."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    count, longest = len(case.lengths), max((*case.lengths, 1))
    shape = (sum(case.lengths),) if case.packed else (count, longest)
    tokens = math.prod(shape)
    spread = _SPREAD.get(case.logits, 1.5) / math.sqrt(case.depth)
    hidden_scale = 3e4 if case.logits == "large_hidden" else 1.0
    hidden = normal(*shape, case.depth).clamp(-2, 2) * hidden_scale
    weight = normal(case.vocab, case.depth, scale=spread / hidden_scale)
    leaves = {
        "hidden": _in_memory(hidden.to(dtype), case.memory),
        "weight": _in_memory(weight.to(dtype), case.memory),
    }
    target = torch.randint(0, case.vocab, shape, generator=generator)
    factors = dtype if case.factors == "same" else getattr(torch, case.factors)
    if case.bias:
        bias = normal(case.vocab) + (900.0 if case.logits == "offset" else 0.0)
        if case.logits == "minus_inf":
            absent = torch.ones(case.vocab, dtype=torch.bool)
            absent[target.flatten()] = False
            absent[0] = False
            bias[absent & (torch.rand(case.vocab, generator=generator) < 0.5)] = -torch.inf
        leaves["bias"] = bias.to(dtype).to(factors).to(dtype).to(factors)
    if case.lora:
        a = normal(case.lora, case.depth, scale=0.5 / hidden_scale)
        b = normal(case.vocab, case.lora, scale=case.factor_size)
        leaves["a"], leaves["b"] = (x.to(dtype).to(factors).to(dtype).to(factors) for x in (a, b))
    embedded = None
    if case.tied:
        embedded = torch.randint(0, case.vocab, shape, generator=generator)
        leaves["hidden"] = leaves["weight"][embedded]

    mask = torch.ones(shape, dtype=torch.bool)
    if not case.packed:
        mask = torch.arange(longest)[None] < torch.tensor(case.lengths)[:, None]
    if case.masked:
        mask = mask & (torch.rand(shape, generator=generator) < 0.7)
    keep = mask.flatten()
    members = torch.rand(tokens, case.vocab, generator=generator) < 0.4
    temperature: float | Tensor = case.settings.get("temperature", 1.0)
    if case.row_temperature:
        temperature = 0.4 + 2 * torch.rand(tokens, generator=generator)
    problem = Problem(
        leaves=leaves,
        target=target,
        mask=mask,
        advantages=_advantages(case, shape, normal),
        fields={},
        cu_seqlens=torch.tensor([0, *case.lengths]).cumsum(0),
        keep=keep,
        members=members if case.sampling_mask else None,
        rollout=Rollout(lengths=(0,), advantages=hidden),
        temperature=temperature[keep] if isinstance(temperature, Tensor) else temperature,
        embedded=embedded,
    )
    if case.divergence:
        problem = replace(problem, teacher=_teacher(case, problem, normal, generator))
    if case.of_loss:
        problem = replace(problem, fields=_logprobs(case, problem, normal))
    return replace(problem, rollout=_rollout(case, problem))


def _in_memory(x: Tensor, memory: str) -> Tensor:
    """Return the same values at other places in memory."""
    *shape, width = x.shape
    if memory == "gaps":
        return x.new_zeros(*shape, width + 3)[..., :width].copy_(x)
    if memory == "sliced":
        return x.new_zeros(*shape, 2 * width + 1)[..., 1::2].copy_(x)
    if memory == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def _advantages(case: Case, shape: tuple[int, ...], normal) -> Tensor:
    if case.advantages == "token":
        values = normal(*shape)
    else:
        values = normal(len(case.lengths))
    if case.advantages == "some_zero":
        values[::2] = 0
    if case.advantages == "all_zero":
        values = values * 0
    return values.float()


def _teacher(
    case: Case, problem: Problem, normal: Callable, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the hidden states and the head of another model, or its first ids of each token."""
    dtype = getattr(torch, case.dtype)
    spread = _SPREAD.get(case.logits, 1.5) / math.sqrt(case.teacher_depth)
    hidden = normal(len(problem.keep), case.teacher_depth).clamp(-2, 2)
    weight = normal(case.vocab, case.teacher_depth, scale=spread)
    teacher = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
    if case.logits == "minus_inf":
        absent = torch.rand(case.vocab, generator=generator) < 0.5
        absent[0] = False
        teacher["bias"] = torch.where(absent, -torch.inf, 0.0).to(dtype)
    if not case.top_k:
        return teacher
    found = replace(problem, teacher=teacher).teacher_scores().log_softmax(-1).topk(case.top_k)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    shape = len(problem.keep), case.top_k
    logprobs, indices = torch.full(shape, torch.nan, dtype=wide), torch.full(shape, -1)
    logprobs[problem.keep], indices[problem.keep] = found.values.to(wide), found.indices
    return {"topk_logprobs": logprobs, "topk_indices": indices}


def _logprobs(case: Case, problem: Problem, normal) -> dict[str, Tensor]:
    """Return old, reference and rollout log-probabilities around the policy's own."""
    hidden = problem.leaves["hidden"].flatten(0, -2)
    head = problem.head(case)
    with torch.no_grad():
        scores = head.scores(hidden)
        found = statistics(scores, problem.target.flatten(), problem.members)
    own = found["masked_logprobs" if case.sampling_mask else "logprobs"]
    own = own.reshape(problem.target.shape)

    def near(scale: float) -> Tensor:
        return (own + normal(*own.shape, scale=scale)).float()

    fields = {}
    size = {"small": 0.2, "zero": 0.0, "huge": 15.0, "none": 0.2}[case.drift]
    if case.drift != "none":
        fields["old_logprobs"] = near(size)
    if case.settings.get("beta"):
        fields["ref_logprobs"] = near(max(size, 0.3))
    if case.rollout in ("given", "unknown", "far"):
        rollout = near(40.0 if case.rollout == "far" else 0.1)
        if case.rollout == "unknown":
            rollout.flatten()[::3] = torch.nan
        fields["rollout_logprobs"] = rollout
    if case.rollout == "weights":
        fields["rollout_weights"] = normal(*own.shape).exp().float()
    return fields


def _rollout(case: Case, problem: Problem) -> Rollout:
    keep, fields = problem.keep, problem.fields
    if case.packed:
        of_token = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
    else:
        of_token = torch.arange(len(case.lengths)).repeat_interleave(problem.target.shape[1])
    lengths = torch.bincount(of_token[keep], minlength=len(case.lengths)).tolist()
    advantages = problem.advantages.flatten()
    # packed, B numbers are read per token if there are as many of these
    per_token = case.advantages == "token" or problem.advantages.shape == problem.target.shape
    each = advantages if per_token else advantages[of_token]

    def valid(name: str) -> Tensor | None:
        return fields[name].flatten()[keep] if name in fields else None

    counts = dict(
        num_items=17.5, num_tokens=11.0, num_sequences=6.5, num_prompts=4.5, entropy_scale=0.5,
        steps=3,
    )  # fmt: skip
    # of neighbours, and of some tokens in another micro-batch
    prompts = [sum(lengths[i - i % 2 : i - i % 2 + 2]) + i % 4 // 2 for i in range(len(lengths))]
    return Rollout(
        lengths=tuple(lengths),
        advantages=each[keep],
        per_token=per_token,
        prompt_tokens=tuple(prompts),
        old=valid("old_logprobs"),
        ref=valid("ref_logprobs"),
        rollout=valid("rollout_logprobs"),
        rollout_weights=valid("rollout_weights"),
        **(counts if case.counts else {}),
    )
