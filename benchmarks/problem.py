"""One off-policy GRPO batch: the inputs that every provider gets."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import real_text
from benchmarks.shapes import DECIDED, DTYPES, REAL, SPREADS, Case, Model, Work
from grpo_kernels import LossConfig, TokenBatch

_CHUNK_ROWS = 128  # of full logits at a time
_LOGPROBS = ("old_logprobs", "ref_logprobs", "dlogprobs")
LOG_RATIOS = (-0.35, -0.1, 0.0, 0.1, 0.3)


@dataclass(frozen=True)
class Problem:
    """Inputs of one case. The policy moved since sampling, so that some ratios are clipped."""

    case: Case
    hidden: Tensor  # (B, L, D), a leaf; needs a gradient unless the work is a forward
    weight: Tensor  # (V, D), also a leaf, unless the head is frozen
    target: Tensor  # (B, L) int64, valid everywhere
    mask: Tensor  # (B, L) bool, False: padding
    advantages: Tensor  # (B,) fp32
    old_logprobs: Tensor | None  # (B, L) fp32; None: on-policy
    ref_logprobs: Tensor | None  # (B, L) fp32, if the loss has a KL term
    dlogprobs: Tensor  # (B, L) fp32, the upstream gradient of a "backward" work
    # for a "divergence", states (T, D') and head (V, D'), without gradients
    teacher: tuple[Tensor, Tensor] | None = None

    @property
    def work(self) -> Work:
        return self.case.work

    @property
    def loss(self) -> LossConfig:
        assert self.work.loss is not None
        return self.work.loss

    @property
    def softcap(self) -> float | None:
        return self.case.model.softcap

    def batch(self) -> TokenBatch:
        return TokenBatch.from_padded(
            self.target,
            self.advantages,
            self.mask,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
        )

    def half(self) -> Problem:
        """Return the first half of the sequences: half of the tokens and of the normalizer."""
        return self.share(0, 2)

    def share(self, which: int, shares: int) -> Problem:
        """Return one of equal shares of the sequences, with its own normalizer."""
        parts = {}
        for name in ("hidden", "target", "mask", "advantages", *_LOGPROBS):
            if (x := getattr(self, name)) is not None:
                part = x.detach().chunk(shares)[which].clone()
                parts[name] = part.requires_grad_(x.requires_grad)
        return replace(self, **parts)


@dataclass(frozen=True)
class Result:
    """The result of a provider; the fields named by ``Work.outputs`` are required."""

    loss: Tensor | None = None  # ()
    logprobs: Tensor | None = None  # (B, L), masked positions hold anything
    entropy: Tensor | None = None  # (B, L), the same
    dhidden: Tensor | None = None  # (B, L, D)
    dweight: Tensor | None = None  # (V, D)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values() if x is not None)


def make_problem(case: Case, device: str = "cpu", exact: bool = True) -> Problem:
    """Return random inputs of ``case``.

    ``exact=False`` leaves out the GEMMs that targets and old log-probabilities need, so that no
    library keeps their buffers while memory is measured.
    """
    work, shape = case.work, (case.sequences, case.length)
    found = _make_inputs(case.model, *shape, case.dtype, device, exact, case.inputs)
    hidden, weight, target, logprobs = found
    trains = work.kind != "forward"
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(shape, generator=generator)
    reference = (logprobs.cpu() + 0.1 * noise).to(device)
    # Two fifths are clipped, and none is so close to its bound that rounding the logits to 16 bits
    # would move it across. A loss with sequence ratios gets one value per sequence.
    of_tokens = work.loss is None or work.loss.scope(False) == "token"
    width = case.length if of_tokens else 1
    choice = torch.randint(len(LOG_RATIOS), (case.sequences, width), generator=generator)
    log_ratios = torch.tensor(LOG_RATIOS)[choice].expand(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    if work.rows == "masked":  # every other sequence is three quarters full, the others one
        mask[0::2, 3 * case.length // 4 :] = False
        mask[1::2, case.length // 4 :] = False
    advantages = torch.linspace(-1.0, 1.5, case.sequences)  # of both signs
    if work.rows == "zero":
        advantages[0::2] = 0
    problem = Problem(
        case=case,
        hidden=hidden.detach().requires_grad_(trains),
        weight=weight.detach().requires_grad_(trains and not work.frozen),
        target=target,
        mask=mask.to(device),
        advantages=advantages.to(device),
        old_logprobs=logprobs - log_ratios.to(device),
        ref_logprobs=reference if work.loss is not None and work.loss.beta else None,
        dlogprobs=torch.randn(shape, generator=generator).to(device) / case.tokens,
    )
    return case.change(problem) if case.change else problem


@functools.lru_cache(maxsize=1)
def _make_inputs(
    model: Model, sequences: int, length: int, dtype: str, device: str, exact: bool, inputs: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states (B, L, D), a head (V, D), targets (B, L) and log-probabilities (B, L).

    The name of the inputs sets the standard deviation of normal logits. The log-probabilities are
    fp32, from unrounded logits, or constant if they don't matter.

    "peaked" logits have a deviation of 2, and target probabilities of 0.002 to 0.998: a policy in
    RL is that sure, and its logits so large that 16 bits round them visibly. The tail is flat,
    unlike a policy's tail. "mostly-decided" logits come from :func:`_make_policy`, and are exact in
    fp64. So are the states of "real-text", an even share of the samples with their targets; for a
    larger head, both are scaled up.
    """
    options = dict(dtype=DTYPES[dtype], device=device)
    shape, decided = (sequences, length), inputs in (DECIDED, REAL)
    generator = torch.Generator(device).manual_seed(_SEED if decided else 0)
    target = None
    if inputs == REAL:
        states, weight, sampled = real_text.load()
        if model.vocabulary > len(weight):
            size = model.vocabulary, model.hidden
            states, weight, sampled = real_text.scaled_up(sequences * length, *size)
        every = len(states) // (sequences * length)
        hidden, weight = (x.to(**options) for x in (states[::every], weight))
        hidden = hidden[: sequences * length].view(*shape, -1)
        target = sampled[::every][: sequences * length].view(shape).to(device)
    elif inputs == DECIDED:
        found = _make_policy(sequences * length, model, generator)
        hidden, weight = (x.to(DTYPES[dtype]) for x in found)
        hidden = hidden.view(*shape, -1)
    else:
        spread = SPREADS[inputs]
        hidden = torch.empty(*shape, model.hidden, **options).normal_(generator=generator)
        weight = torch.empty(model.vocabulary, model.hidden, **options)
        weight.normal_(std=spread.competing / model.hidden**0.5, generator=generator)
        if spread.every > 1:
            competing = weight[:: spread.every].clone()
            weight.mul_(spread.others / spread.competing)[:: spread.every] = competing
        target = torch.randint(model.vocabulary, shape, generator=generator, device=device)
    if inputs == "peaked":
        # lse of the other tokens is about log V + 2; a unit of weight[target] adds 4 to its logit
        raised = torch.rand(target.shape, generator=generator, device=device) * 12 - 4
        boost = (math.log(model.vocabulary) + raised) / 4
        hidden.add_((boost.unsqueeze(-1) * weight[target].float()).to(hidden.dtype))
    if not exact and not decided:
        return hidden, weight, target, torch.full(shape, -1.0, device=device)
    wide = torch.float64 if decided else torch.float32
    rows, head = hidden.flatten(0, 1).to(wide), weight.to(wide)
    if inputs not in ("peaked", REAL):
        target = sample(rows, head, model.softcap, generator).view(shape)
    logprobs, _ = statistics(rows, target.flatten(), head, model.softcap)
    return hidden, weight, target, logprobs.float().view(shape)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def statistics(
    hidden: Tensor,  # (T, D)
    target: Tensor,  # (T,)
    weight: Tensor,  # (V, D)
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (T,) log-probabilities and entropies; a backward computes the logits again."""

    def of_chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logps = softcapped(hidden @ weight.t(), softcap).log_softmax(-1)
        return logps.gather(-1, target[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)

    chunks = zip(hidden.split(_CHUNK_ROWS), target.split(_CHUNK_ROWS), strict=True)
    found = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropy = map(torch.cat, zip(*found, strict=True))
    return logprobs, entropy


# by the beta that TRL and Liger use for them
DIVERGENCES = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


def with_teacher(depth: int, problem: Problem) -> Problem:
    """Add a teacher of another depth, as unlike the policy as random logits are."""
    generator = torch.Generator().manual_seed(4)
    options = {"device": problem.hidden.device, "dtype": problem.hidden.dtype}
    states = torch.randn(problem.case.tokens, depth, generator=generator).to(**options)
    head = torch.randn(problem.case.model.vocabulary, depth, generator=generator)
    return replace(problem, teacher=(states, head.mul_(2 / depth**0.5).to(**options)))


def divergence(problem: Problem, chunk_rows: int | None = None) -> Tensor:
    """Return the mean over the tokens, (); ``chunk_rows``: so many logits at a time."""
    assert problem.teacher is not None
    kind, (states, head) = problem.work.name, problem.teacher

    def of_chunk(hidden: Tensor, states: Tensor) -> Tensor:
        pairs = (hidden, problem.weight), (states, head)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_s, log_t = ((x @ weight.t()).to(wide).log_softmax(-1) for x, weight in pairs)
        if kind == "forward_kl":
            return (log_t.exp() * (log_t - log_s)).sum(-1)
        if kind == "reverse_kl":
            return (log_s.exp() * (log_s - log_t)).sum(-1)
        middle = (0.5 * log_s.exp() + 0.5 * log_t.exp()).log()
        apart = log_t.exp() * (log_t - middle) + log_s.exp() * (log_s - middle)
        return 0.5 * apart.sum(-1)

    hidden = problem.hidden.flatten(0, 1)
    if chunk_rows is None:
        return of_chunk(hidden, states).mean()
    chunks = zip(hidden.split(chunk_rows), states.split(chunk_rows), strict=True)
    found = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(found).mean()


def sample(
    hidden: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    softcap: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample a token from each row's distribution, (T,)."""
    found = []
    for chunk in hidden.split(_CHUNK_ROWS):
        probs = softcapped(chunk @ weight.t(), softcap).softmax(-1)
        found.append(torch.multinomial(probs, 1, generator=generator).squeeze(-1))
    return torch.cat(found)


def detached(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the same values in ``dtype``, without gradients."""
    teacher = None if problem.teacher is None else tuple(x.to(dtype) for x in problem.teacher)
    hidden, weight = (x.detach().to(dtype) for x in (problem.hidden, problem.weight))
    return replace(problem, hidden=hidden, weight=weight, teacher=teacher)


# Mostly decided inputs: next-token distributions like a policy in RL. Most tokens are all but
# decided; a fifth is not, and carries the entropy (arXiv:2506.01939). The targets are sampled from
# the distributions, so that rare targets are as frequent as they should be.
_SEED = 7
_ROW_NORM = 2.0  # of the head's rows: hidden states of deviation s give logits of deviation 2 s
_FAVORITES = 2  # rows of the head that a hidden state points at
_DECIDED = 0.8  # of the tokens
# Deviation of the logits, as a part of the one at which a single token takes all of the mass. The
# entropy of normal logits is log V - deviation^2 / 2 up to there (Derrida 1981).
_SPREADS = {True: (0.45, 0.75), False: (0.83, 0.97)}
# Log-odds of the first favorite against all other ids, and how far the next favorite is behind.
_ODDS = {True: (4.0, 13.0), False: (-2.0, 1.0)}
_BEHIND = {True: (2.0, 10.0), False: (0.0, 2.0)}


def _make_policy(tokens: int, model: Model, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (T, D) states, noise plus each favorite's row of the head by its odds, and a head."""
    weight = torch.empty(model.vocabulary, model.hidden, device=generator.device)
    weight.normal_(std=_ROW_NORM / model.hidden**0.5, generator=generator)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=weight.device)

    decided = draw(tokens) < _DECIDED
    critical = math.sqrt(2 * math.log(model.vocabulary))
    spread = critical * _between(_SPREADS, decided, draw(tokens))
    noise = torch.empty(tokens, model.hidden, device=weight.device)
    noise.normal_(generator=generator).mul_(spread[:, None] / _ROW_NORM)
    rows = torch.randint(
        model.vocabulary, (tokens, _FAVORITES), generator=generator, device=weight.device
    )
    behind = _between(_BEHIND, decided, draw(tokens))[:, None]
    steps = torch.arange(_FAVORITES, device=weight.device)
    odds = _between(_ODDS, decided, draw(tokens))[:, None] - behind * steps
    favorites = weight[rows]  # (T, favorites, D)
    present = torch.einsum("td,tkd->tk", noise, favorites)
    # the other logits are normal: the first term is the logarithm of their summed exponentials
    wanted = (math.log(model.vocabulary) + spread.square() / 2)[:, None] + odds
    strength = (wanted - present) / _ROW_NORM**2
    return noise + torch.einsum("tk,tkd->td", strength, favorites), weight


def _between(ranges: dict[bool, tuple[float, float]], decided: Tensor, share: Tensor) -> Tensor:
    """Return (T,) values ``share`` of the way through the range of decided or of open tokens."""
    low, high = (torch.where(decided, ranges[True][end], ranges[False][end]) for end in (0, 1))
    return low + share * (high - low)
