"""The oracle: a linear head and every policy loss in plain torch, written from their papers.

It imports nothing of what it judges. In fp64 it is the exact answer; in the dtype of a case it is
the eager implementation whose error is the yardstick. Sequences are looped over one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# of a log-ratio, in nats: where every ratio is held
LIMIT = 20.0

# what a loss does where a caller says nothing
DEFAULTS: dict[str, Any] = dict(
    beta=0.0,
    importance_sampling_level="token",
    temperature=1.0,
    kl_estimator="k3",
    use_bias_correction_kl=True,
    max_completion_length=None,
    entropy_coef=0.0,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    rollout_correction_mode="sequence_mask",
    rollout_correction_max=3.0,
    rollout_correction_min=None,
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    dual_clip=None,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    gmpo_clip=0.4,
    bypass_mode=None,
    loss_aggregation=None,
    exclude_zero_variance=False,
    ce_gppo_low=0.75,
    ce_gppo_high=1.0,
    aspo_ratio_max=3.0,
    fipo_decay_rate=32.0,
    fipo_clip=0.2,
    fipo_clip_high_only=True,
    fipo_safety_threshold=4.0,
    dppo_tv_low=0.2,
    dppo_tv_high=0.2,
    dppo_kl_low=0.05,
    dppo_kl_high=0.05,
    dppo_ratio_max=20.0,
    dppo_tau=0.0,
    ipo_threshold=0.1,
    ipo_tau=1e-3,
    icepop_low=0.2,
    icepop_high=5.0,
    kpop_threshold=0.1,
    trm_threshold=None,
    vaco_threshold=None,
    cppo_delta=0.2,
    cppo_w_min=0.8,
    cppo_delta_b=0.02,
)
SEQUENCE_RATIO = ("gspo", "luspo")
GATED = ("dppo_tv", "dppo_kl", "ipo", "icepop", "kpop", "trm", "vaco", "cppo")
# that form what they need of a sequence themselves
OWN_RATIOS = ("vespo", "gmpo", "fipo", *GATED)
OWN_SEQUENCES = ("vespo", "gmpo", "fipo", "trm", "vaco", "cppo")
ORDERED = ("fipo", "cppo")  # whose sums run along a sequence
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """What makes scores: ``softcap * tanh(scale * (x W^T + s x A^T B^T + b) / softcap) / T``."""

    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    lora: tuple[Tensor, Tensor, float] | None = None  # (r, D), (V, r), scaling
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0  # or (T,)

    def scores(
        self,
        hidden: Tensor,  # (T, D)
        dtype: torch.dtype = torch.float64,  # that everything is computed in
        rounded: torch.dtype | None = None,  # that logits are stored in; None: ``dtype``
        narrow: tuple[torch.dtype, float] | None = None,  # that their gradients are multiplied in
        more: Tensor | float = 0.0,  # (T, V) added to the logits
    ) -> Tensor:
        """Return the (T, V) scores."""
        logits = hidden.to(dtype) @ self.weight.to(dtype).t()
        if self.lora is not None:
            a, b, scaling = self.lora
            logits = logits + scaling * (hidden.to(dtype) @ a.to(dtype).t()) @ b.to(dtype).t()
        if rounded is not None:
            logits = logits.to(rounded)
        if self.bias is not None:
            logits = (logits + self.bias).to(logits.dtype)
        logits = logits.to(dtype) + more
        if narrow is not None and logits.requires_grad:
            logits.register_hook(lambda gradient: _narrowed(gradient, *narrow))
        return transformed(logits, self.logit_scale, self.softcap, self.temperature)


def transformed(
    logits: Tensor,  # (T, V)
    logit_scale: float,
    softcap: float | None,
    temperature: float | Tensor,
) -> Tensor:
    """Return the (T, V) scores of raw logits."""
    scores = logits * logit_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(temperature, Tensor):
        return scores / temperature.to(scores.dtype)[:, None]
    return scores / temperature


def _narrowed(gradient: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """Round with one scale a row, so that the range of the dtype does not matter."""
    scale = gradient.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().ceil().exp2() * factor
    return (gradient / scale).to(dtype).to(gradient.dtype) * scale


def statistics(
    scores: Tensor,  # (T, V)
    target: Tensor,  # (T,)
    members: Tensor | None = None,  # (T, V) bool, what sampling left
) -> dict[str, Tensor]:
    """Return what can be asked of a row of scores, each (T,)."""
    logp = scores.log_softmax(-1)
    finite = torch.where(logp > -torch.inf, logp, 0.0)  # 0 log 0 is 0
    own = scores.gather(-1, target[:, None])[:, 0]
    found = dict(
        logprobs=logp.gather(-1, target[:, None])[:, 0],
        entropy=-(logp.exp() * finite).sum(-1),
        lse=scores.logsumexp(-1),
        sum_sq_probs=logp.exp().square().sum(-1),
        max_logit=scores.amax(-1),
        min_logit=scores.amin(-1),
        mean_logit=scores.mean(-1),
    )
    if members is not None:
        members = members.scatter(-1, target[:, None], True)
        found["masked_logprobs"] = own - scores.masked_fill(~members, -torch.inf).logsumexp(-1)
    return found


LEAST = -1e4  # an id of probability 0 counts as one of exp(LEAST)


def _at_least(logp: Tensor) -> Tensor:
    """Return the same, at least ``LEAST``; unlike that of a clamp, the gradient passes."""
    held = logp.clone()
    with torch.no_grad():
        held.clamp_(min=LEAST)
    return held


def with_tail(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the (T, k + 1) log-probabilities of some ids, and of all others as one."""
    rest = scores.scatter(-1, ids, -torch.inf)
    empty = (rest == -torch.inf).all(-1, keepdim=True)
    tail = rest.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    return torch.cat([scores.gather(-1, ids), tail], -1).log_softmax(-1)


def divergence(logp: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Return the (T,) divergence of (T, N) log-probabilities from the teacher's."""
    logp, teacher = _at_least(logp), teacher.clamp(min=LEAST)
    to_student, to_teacher = logp, teacher
    if kind == "jsd":
        mean = torch.logaddexp(math.log1p(-beta) + logp, math.log(beta) + teacher)
        to_student = to_teacher = mean
    of_teacher = (teacher.exp() * (teacher - to_student)).sum(-1)
    of_student = (logp.exp() * (logp - to_teacher)).sum(-1)
    shares = {"forward_kl": (1.0, 0.0), "reverse_kl": (0.0, 1.0), "jsd": (beta, 1 - beta)}
    share_of_teacher, share_of_student = shares[kind]
    return share_of_teacher * of_teacher + share_of_student * of_student


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The valid tokens of some sequences, one sequence behind the other."""

    lengths: tuple[int, ...]
    advantages: Tensor  # (T,)
    per_token: bool = False  # they were given one a token
    old: Tensor | None = None  # (T,) log-probabilities, as the next two
    ref: Tensor | None = None
    rollout: Tensor | None = None  # NaN: unknown
    rollout_weights: Tensor | None = None
    num_items: float | None = None
    num_tokens: float | None = None
    num_sequences: float | None = None
    prompt_tokens: tuple[int, ...] | None = None  # of all sequences of each one's prompt
    num_prompts: float | None = None
    entropy_scale: float = 1.0
    steps: int = 1

    @property
    def num_valid(self) -> int:
        return sum(self.lengths)

    def sequences(self) -> Iterator[slice]:
        """Yield the place of each sequence, of empty ones too."""
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length

    def means(self, values: Tensor) -> Tensor:
        """Return the (B,) means over sequences, 0 for an empty one."""
        each = [values[s].sum() / max(s.stop - s.start, 1) for s in self.sequences()]
        return torch.stack(each) if each else values.new_zeros(0)

    def sums(self, values: Tensor) -> Tensor:
        """Return the (B,) sums over sequences."""
        each = [values[s].sum() for s in self.sequences()]
        return torch.stack(each) if each else values.new_zeros(0)

    def expand(self, values: Tensor) -> Tensor:
        """Return (B,) values at the tokens of their sequences."""
        return values.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))


def settings_of(loss_type: str, settings: dict[str, Any]) -> SimpleNamespace:
    """Return all settings of a loss: those given, and the defaults of its paper."""
    c = SimpleNamespace(**DEFAULTS | settings, loss_type=loss_type)
    if c.importance_sampling_level is None or "importance_sampling_level" not in settings:
        c.importance_sampling_level = "sequence" if loss_type in SEQUENCE_RATIO else "token"
    if c.bypass_mode is None:
        c.bypass_mode = loss_type in GATED
    if c.epsilon_high is None:
        c.epsilon_high = c.epsilon
    return c


def policy_loss(
    logprobs: Tensor,  # (T,)
    entropy: Tensor,  # (T,) nats
    x: Rollout,
    c: SimpleNamespace,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the () loss and its metrics; a metric that nothing contributes to is NaN."""
    old = before = logprobs.detach() if x.old is None else x.old.to(logprobs)
    if c.bypass_mode:
        assert x.rollout is not None
        engine = x.rollout.to(logprobs)
        old, before = torch.where(engine.isnan(), old, engine), logprobs.detach()
    advantages = x.advantages.to(logprobs)
    log_ratio = _log_ratio(logprobs, old, x, c)
    ratio = log_ratio.exp()
    weights = _correction(before, x, c)  # (T,) or (B,) or None
    per_token = x.expand(weights) if _by_sequence(x, c) and weights is not None else weights

    each, metrics = _surrogate(logprobs, old, log_ratio, advantages, per_token, x, c)
    if c.off_policy_mask_threshold is not None:
        sampled = old if x.rollout is None else x.rollout.to(logprobs)
        drift = (sampled - logprobs.detach()).nan_to_num(nan=0.0)
        near = x.expand(x.means(drift)) <= c.off_policy_mask_threshold
        each = each * ((advantages >= 0) | near)
    gate = None
    if c.top_entropy_quantile < 1:
        detached = entropy.detach()
        least = torch.quantile(detached, 1 - c.top_entropy_quantile) if len(detached) else 0.0
        gate = (detached >= least).to(logprobs)
        each = each * gate
    if per_token is not None and c.loss_type != "vespo":  # which has it in itself
        each = each * per_token
    if c.beta:
        kl = _kl(x.ref.to(logprobs) - logprobs, c.kl_estimator)
        if c.use_bias_correction_kl:
            kl = kl * ratio
        each = each + c.beta * kl
        metrics["kl"] = kl.mean()

    weight = _token_weights(x, c).to(logprobs)
    policy = (each * weight).sum()
    loss = policy
    if c.entropy_coef:
        share = torch.ones_like(entropy) if gate is None else gate
        count = x.num_valid if x.num_tokens is None else x.num_tokens
        if gate is not None:
            share = share * x.num_valid / gate.sum().clamp(min=1)
        bonus = (share * entropy).sum() / (count or 1) / x.steps * x.entropy_scale
        loss = policy - c.entropy_coef * bonus
        window = 1 if aggregation(c) in ("window_token_mean", "prompt_mean") else x.steps
        metrics["policy_loss"] = policy * window
    metrics |= _common_metrics(logprobs, entropy, ratio, weights, before, gate, x)
    return loss, {name: value.detach() for name, value in metrics.items()}


def _log_ratio(logprobs: Tensor, old: Tensor, x: Rollout, c: SimpleNamespace) -> Tensor:
    drift = logprobs - old
    if c.importance_sampling_level == "sequence":
        drift = x.expand(x.means(drift))
    elif c.importance_sampling_level == "sequence_token":
        drift = logprobs - logprobs.detach() + x.expand(x.means(drift)).detach()
    return drift.clamp(-LIMIT, LIMIT)


def _surrogate(
    logprobs: Tensor,
    old: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    x: Rollout,
    c: SimpleNamespace,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss (T,), and the metrics of this loss."""
    ratio, up = log_ratio.exp(), advantages >= 0
    one_each = c.importance_sampling_level != "token" and not x.per_token
    if c.loss_type in GATED:
        return _gated(logprobs, old, ratio.detach(), advantages, x, c)
    if c.loss_type == "fipo":
        advantages = advantages * _influence(log_ratio.detach(), advantages, x, c)
    if c.loss_type in ("ce_gppo", "aspo"):
        low = (ratio < 1 - c.epsilon) & (advantages < 0)
        high = (ratio > 1 + c.epsilon_high) & (advantages > 0)
        each = ratio.detach()
        if c.loss_type == "ce_gppo":
            each = torch.where(low, c.ce_gppo_low * (1 - c.epsilon), each)
            each = torch.where(high, c.ce_gppo_high * (1 + c.epsilon_high), each)
        else:
            each = torch.where(advantages > 0, 1 / each, each).clamp(max=c.aspo_ratio_max)
            each = torch.where(low | high, 0.0, each)
        return -each * advantages * logprobs, _clip_metrics(low, high, x, one_each)
    if c.loss_type in CLIPPED or c.loss_type == "fipo":
        free = ratio if c.delta is None else ratio.clamp(max=c.delta)
        held = ratio.clamp(1 - c.epsilon, 1 + c.epsilon_high)
        # the gradient of equal values is that of the free one
        each = -torch.where(free * advantages <= held * advantages, free, held) * advantages
        if c.dual_clip is not None:
            each = torch.where(up, each, torch.minimum(each, -c.dual_clip * advantages))
        low = (free < 1 - c.epsilon) & (advantages < 0)
        high = (free > 1 + c.epsilon_high) & (advantages > 0)
        return each, _clip_metrics(low, high, x, one_each)
    if c.loss_type == "cispo":
        high = (ratio > c.epsilon_high) & (advantages > 0)
        each = -ratio.clamp(max=c.epsilon_high).detach() * advantages * logprobs
        means = x.means(high.to(ratio)) if one_each else high.to(ratio)
        return each, {"cispo_clip_ratio": means.mean()}
    if c.loss_type == "sapo":
        tau = _choose(advantages > 0, c.sapo_temperature_pos, c.sapo_temperature_neg, ratio)
        above = tau * (ratio - 1)  # autograd's sigmoid has slope 0 where it rounds to 1
        gate = torch.where(above > 0, 1 - torch.sigmoid(-above), torch.sigmoid(above))
        return -gate * 4 / tau * advantages, {}
    if c.loss_type == "gmpo":
        sign = _choose(up, 1.0, -1.0, ratio)
        held = sign * (sign * log_ratio).clamp(max=c.gmpo_clip)
        low = (log_ratio < -c.gmpo_clip) & (advantages < 0)
        high = (log_ratio > c.gmpo_clip) & (advantages > 0)
        each = -x.expand(x.means(held)).exp() * advantages
        return each, _clip_metrics(low, high, x, one_each)
    if c.loss_type == "vespo":
        return _vespo(logprobs, old, advantages, weights, x, c)
    tapered = torch.where(up, 1.0, ratio.detach().clamp(max=1.0))
    return -(tapered if c.loss_type == "topr" else 1.0) * advantages * logprobs, {}


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL of two coins that show this token, sum p log(p / q), by their log-probabilities."""
    p, q = p.double().exp(), q.double().exp()
    sides = (p, q.clamp(min=math.exp(-80))), ((1 - p).clamp(min=1e-8), (1 - q).clamp(min=1e-8))
    return sum(torch.xlogy(this, this / other) for this, other in sides)


def _gated(
    logprobs: Tensor,
    old: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    x: Rollout,
    c: SimpleNamespace,
) -> tuple[Tensor, dict[str, Tensor]]:
    own, up, down = logprobs.detach(), advantages > 0, advantages < 0
    rise, tau = own.exp() - old.exp(), 0.0
    if c.loss_type == "dppo_tv":
        drop = (up & (rise > c.dppo_tv_high)) | (down & (-rise > c.dppo_tv_low))
    elif c.loss_type == "dppo_kl":
        kl = _binary_kl(old, own)
        drop = (up & (own > old) & (kl > c.dppo_kl_high)) | (
            down & (own < old) & (kl > c.dppo_kl_low)
        )
    elif c.loss_type == "ipo":
        drop, tau = rise.abs() > c.ipo_threshold, c.ipo_tau
    elif c.loss_type == "icepop":
        drop = ((own - old).exp() < c.icepop_low) | ((own - old).exp() > c.icepop_high)
    elif c.loss_type == "kpop":
        drop = torch.maximum(_binary_kl(old, own), _binary_kl(own, old)) > c.kpop_threshold
    elif c.loss_type == "trm":
        kl = _binary_kl(old, own)
        largest = [kl[s].max() if s.stop > s.start else kl.new_zeros(()) for s in x.sequences()]
        drop = x.expand(torch.stack(largest) if largest else kl)
        drop = drop > c.trm_threshold
    elif c.loss_type == "vaco":
        away = (up & (own > old)) | (down & (own < old))
        drop = away & (x.expand(x.means((ratio - 1).abs())) / 2 > c.vaco_threshold)
    else:
        drop = _cppo(rise.abs(), (up & (own > old)) | (down & (own < old)), x, c)
    weight = ratio
    if c.loss_type[:4] == "dppo":
        weight, tau = ratio.clamp(max=c.dppo_ratio_max), c.dppo_tau
    each = -torch.where(drop, 0.0, weight) * advantages * logprobs + tau * (logprobs - old) ** 2
    return each, _clip_metrics(drop & down, drop & up, x, False)


def _cppo(distance: Tensor, away: Tensor, x: Rollout, c: SimpleNamespace) -> Tensor:
    """Return which tokens are dropped: the recurrences of the paper, token by token, in fp64."""
    dropped = []
    for part in x.sequences():
        moves, last = distance[part].double(), max(part.stop - part.start - 1, 1)
        if len(moves):
            budget = float(moves.quantile(0.9).clamp(c.cppo_delta_b, 2 * c.cppo_delta_b))
        spent = weights = 0.0
        for t, move in enumerate(moves.tolist()):
            w = 1 - (1 - c.cppo_w_min) * t / last
            dropped.append(w * move > min(c.cppo_delta, c.cppo_delta + budget * weights - spent))
            spent, weights = spent + w * move, weights + w
    return torch.tensor(dropped, dtype=torch.bool) & away


def _influence(log_ratio: Tensor, advantages: Tensor, x: Rollout, c: SimpleNamespace) -> Tensor:
    """Return FIPO's weights: the discounted log-ratios from each token to the end."""
    counted = log_ratio.double()
    if c.dual_clip is not None:
        counted = torch.where(log_ratio.exp() > c.dual_clip, 0.0, counted)
    future = torch.zeros_like(counted)
    for part in x.sequences():
        rest = 0.0
        for t in reversed(range(part.start, part.stop)):
            rest = float(counted[t]) + 0.5 ** (1 / c.fipo_decay_rate) * rest
            future[t] = rest
    least = 1.0 if c.fipo_clip_high_only else 1 - c.fipo_clip
    weight = future.to(log_ratio).exp().clamp(least, 1 + c.fipo_clip)
    if c.fipo_safety_threshold is None:
        return weight
    risky = (advantages < 0) & (log_ratio.exp() > c.fipo_safety_threshold)
    return torch.where(risky, weight.clamp(0.8, 1.0), weight)


def _vespo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    x: Rollout,
    c: SimpleNamespace,
) -> tuple[Tensor, dict[str, Tensor]]:
    floor = torch.tensor(1e-8, dtype=torch.float64).log().item()
    log_weight = x.sums((logprobs - old).detach().clamp(-LIMIT, LIMIT))
    if weights is not None:
        log_weight = log_weight + x.sums(weights.log().clamp(floor, LIMIT))
    log_weight = log_weight.clamp(floor, LIMIT)

    def phi(w: Tensor, up: Tensor) -> Tensor:
        k = _choose(up, c.vespo_k_pos, c.vespo_k_neg, w)
        rate = _choose(up, c.vespo_lambda_pos, c.vespo_lambda_neg, w).clamp(min=1e-4)
        value = torch.exp(rate * (1 - w.exp()) + k * w)
        return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    each = -phi(x.expand(log_weight), advantages >= 0) * advantages * logprobs
    mostly_up = x.means((advantages >= 0).to(logprobs)) > 0.5
    return each, {"vespo/phi_seq_mean": phi(log_weight, mostly_up).mean()}


def _choose(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    return torch.where(condition, like.new_tensor(first), like.new_tensor(second))


def _kl(difference: Tensor, estimator: str) -> Tensor:
    """Return Schulman's estimate for ``reference - policy``, k3 with a straight line beyond."""
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "abs":
        return difference.abs()
    held = difference.clamp(max=LIMIT)
    beyond = (difference - LIMIT).clamp(min=0)
    return torch.expm1(held) - held + beyond * (held.exp().detach() - 1)


_ESTIMATES = ("_k1", "_k2", "_k3")


def _mode(c: SimpleNamespace) -> str | None:
    """Return the correction, of which bypass mode leaves those that only keep or drop."""
    mode = c.rollout_correction_mode
    return None if mode is None or (c.bypass_mode and mode[-3:] not in _ESTIMATES) else mode


def _by_sequence(x: Rollout, c: SimpleNamespace) -> bool:
    by_sequence = (_mode(c) or "").startswith(("sequence", "geometric"))
    return x.rollout_weights is None and by_sequence


def _correction(old: Tensor, x: Rollout, c: SimpleNamespace) -> Tensor | None:
    """Return the truncated or masked importance weight against the engine that sampled."""
    if x.rollout_weights is not None:
        return x.rollout_weights.to(old)
    mode = _mode(c)
    if x.rollout is None or mode is None:
        return None
    drift = (old - x.rollout.to(old)).nan_to_num(nan=0.0)
    weight = (x.sums(drift) if _by_sequence(x, c) else drift).exp()
    low, high = c.rollout_correction_min, c.rollout_correction_max
    largest = torch.tensor(LIMIT, dtype=torch.float64).exp().item()
    if mode.endswith("truncate"):
        return weight.clamp(min=low, max=largest if high is None else high)
    held = _held_to_bounds(drift, x, mode)
    inside = torch.ones_like(weight, dtype=torch.bool)
    if low is not None:
        inside &= held >= low
    if high is not None:
        inside &= held <= high
    if mode[-3:] in _ESTIMATES:
        return inside.to(weight)
    return torch.where(inside, weight.clamp(max=largest), 0.0)


def _held_to_bounds(drift: Tensor, x: Rollout, mode: str) -> Tensor:
    """Return what a mask compares with its bounds: a ratio, or an estimate of the divergence."""
    if mode.endswith(("_mask", "_k1")):
        drift = -drift if mode.endswith("_k1") else drift  # k1 is log(engine / old policy)
        if mode.startswith("token"):
            return drift.exp()
        by_product = mode in ("sequence_mask", "sequence_sum_k1")
        return (x.sums(drift) if by_product else x.means(drift)).exp()
    each = drift.square() / 2 if mode.endswith("_k2") else torch.expm1(drift) - drift
    if mode.startswith("token"):
        return each
    if mode.startswith("sequence_max"):
        largest = [each[s].max() if s.stop > s.start else each.new_zeros(()) for s in x.sequences()]
        return torch.stack(largest) if largest else each.new_zeros(0)
    return x.sums(each) if mode.startswith("sequence_sum") else x.means(each)


def _token_weights(x: Rollout, c: SimpleNamespace) -> Tensor:
    """Return the share of each token's loss in that of the batch, (T,) fp64."""
    lengths = torch.tensor(x.lengths, dtype=torch.float64)
    kept = torch.ones(len(x.lengths), dtype=torch.float64)
    if c.exclude_zero_variance:
        kept = (x.sums((x.advantages != 0).double()) > 0).double()
    sequences, tokens = max(float(kept.sum()), 1.0), float((kept * lengths).sum())
    sequences = sequences if x.num_sequences is None else x.num_sequences
    each = x.expand(kept)
    by = aggregation(c)
    if by == "sequence_mean":
        return each * x.expand(1 / lengths.clamp(min=1)) / sequences / x.steps
    if by == "sequence_sum":
        return each / sequences / x.steps
    if by == "fixed_length":
        return each / (sequences * c.max_completion_length) / x.steps
    if by == "token_mean":
        count = tokens if x.num_tokens is None else x.num_tokens
        return each / (count or 1) / x.steps
    if by == "prompt_mean":
        assert x.prompt_tokens is not None
        share = x.expand(1 / torch.tensor(x.prompt_tokens, dtype=torch.float64).clamp(min=1))
        count = float((each * share).sum()) * x.steps if x.num_prompts is None else x.num_prompts
        return each * share / (count or 1)
    count = tokens * x.steps if x.num_items is None else x.num_items
    return each / (count or 1)


def aggregation(c: SimpleNamespace) -> str:
    """Return how the losses of tokens become one."""
    own = {"luspo": "sequence_sum", "dr_grpo": "fixed_length", "bnpo": "token_mean"}
    means = dict.fromkeys(("grpo", "gspo", "sapo", "gmpo"), "sequence_mean")
    return c.loss_aggregation or (own | means).get(c.loss_type, "window_token_mean")


def _clip_metrics(low: Tensor, high: Tensor, x: Rollout, one_each: bool) -> dict[str, Tensor]:
    low, high = low.double(), high.double()
    occupied = torch.tensor([length > 0 or one_each for length in x.lengths], dtype=torch.bool)
    lows, highs = x.means(low)[occupied], x.means(high)[occupied]
    both = torch.maximum(low, high)
    nothing = low.new_tensor(torch.nan)
    return {
        "clip_ratio/low_mean": (x.means(low) if one_each else low).mean(),
        "clip_ratio/low_min": lows.min() if len(lows) else nothing,
        "clip_ratio/high_mean": (x.means(high) if one_each else high).mean(),
        "clip_ratio/high_max": highs.max() if len(highs) else nothing,
        "clip_ratio/region_mean": (x.means(both) if one_each else both).mean(),
    }


def _common_metrics(
    logprobs: Tensor,
    entropy: Tensor,
    ratio: Tensor,
    weights: Tensor | None,
    old: Tensor,
    gate: Tensor | None,
    x: Rollout,
) -> dict[str, Tensor]:
    occupied = torch.tensor([length > 0 for length in x.lengths], dtype=torch.bool)
    means = x.means(entropy)[occupied]
    found = {
        "entropy": entropy.mean(),
        "ratio/ess": ratio.sum().square() / (len(ratio) * ratio.square().sum()),
        "perplexity": (-logprobs.mean()).exp(),
    }
    groups = {"entropy/sequence": means, "ratio": ratio}
    if gate is not None:
        found["entropy_top"] = (gate * entropy).sum() / gate.sum()
    if weights is not None:
        name = "sampling/importance_sampling_ratio"
        groups[name] = weights
        found[f"{name}/mean"] = weights.mean()
    if x.rollout is not None:
        known = ~x.rollout.isnan()
        drift = (old - x.rollout.to(old))[known]
        groups["sampling/sampling_logp_difference"] = drift.abs()
        found["sampling/sampling_logp_difference/mean"] = drift.abs().mean()
        found["sampling/mismatch_kl_k1"] = -drift.mean()
        found["sampling/mismatch_kl_k3"] = _kl(drift, "k3").mean()
        found["sampling/rollout_perplexity"] = (-x.rollout[known].to(old).mean()).exp()
    for name, values in groups.items():
        joint = "_" if name == "entropy/sequence" else "/"
        nothing = values.new_tensor(torch.nan)
        found[f"{name}{joint}min"] = values.min() if len(values) else nothing
        found[f"{name}{joint}max"] = values.max() if len(values) else nothing
    found.pop("sampling/sampling_logp_difference/min", None)
    return found
