"""A step of a model with Gemma 3's vocabulary: time, memory, and the longest sequence.

The model has the sizes of Gemma 3 1B and random weights. A step is forward and backward of a GRPO
loss on one sequence, with gradient checkpointing and without an optimizer. On a CPU only the memory
is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.check import StepResult, compare_steps, reference, take_gradient, why_wrong
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import add_growth, attempt, free, race
from benchmarks.problem import LOG_RATIOS, Problem, Result
from benchmarks.providers import PROVIDERS
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, MODELS, WORKS, Model, make_case
from benchmarks.timing import cuda_growth, make_timer, resident_growth

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUNDS = 3
_CARD = 24 << 30  # bytes for the longest sequence; a larger card would take minutes
_SEED = 0
Run = Callable[[Problem], Result]


class Body(NamedTuple):
    """Sizes of a layer."""

    heads: int
    head_dim: int
    intermediate: int
    window: int  # window of most layers, in tokens


_GEMMA = Body(heads=4, head_dim=256, intermediate=6912, window=512)
_TINY = Body(heads=2, head_dim=16, intermediate=64, window=8)


@dataclass(frozen=True)
class Case:
    """A model and its sequences."""

    head: Model
    body: Body
    layers: int
    dtype: str  # a name of DTYPES
    tokens: int  # of the sequence that is timed
    checked: int  # tokens of the sequence for the comparison of gradients
    step: int = 0  # the step of the search for the longest sequence, in tokens; 0: no search
    most: int = 0  # the largest number of tokens

    def facts(self) -> dict[str, Any]:
        """Return the facts for a result file."""
        facts: dict[str, Any] = {"model": self.head.name, "layers": self.layers}
        facts |= {"hidden": self.head.hidden, "vocabulary": self.head.vocabulary}
        return {**facts, "tokens": self.tokens, "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.head.name}-{self.layers}-layers-{self.tokens}-{self.dtype}"


_ON_CPU = [Case(MODELS["gemma-3-1b"], _GEMMA, 2, dtype, 1024, 64) for dtype in DTYPES]
_ON_GPU = [Case(MODELS["gemma-3-1b"], _GEMMA, 26, "bf16", 8192, 256, step=2048, most=65536)]
CASES = {
    "tiny": [Case(MODELS["tiny"], _TINY, 2, dtype, 32, 16, step=16, most=64) for dtype in DTYPES],
    "cpu": _ON_CPU,
    "gpu": _ON_GPU,
    "gpu-full": _ON_GPU,
}


NOTES = {name: PROVIDERS[name].note for name in ("ours", "trl", "eager")}


def about(case: Case, device: str) -> str:
    return (
        f"{case.layers} layers, random weights; one sequence, gradient checkpointing, no optimizer;"
        f" errors at {case.checked} tokens, the head's results in float64"
    )


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    device = session.device
    for row in rows:
        row.leave_out("absent", PROVIDERS[row.provider].absent(device))
    if device == "cpu" and session.suite != "tiny":  # while this process is small
        add_growth(rows, partial(ask, growth, case, device))
    policy = Policy(case, device)
    _compare(rows, policy)
    for row in rows if device == "cuda" else ():
        with attempt(row):
            add_growth([row], policy.growth)
    if (
        device == "cuda" or session.suite == "tiny"
    ):  # the benchmark of the heads has the times of a CPU
        steps = [(row, partial(policy.step, row.provider, case.tokens)) for row in rows if row.runs]
        race(steps, session.rounds(_ROUNDS), make_timer(device))
    if case.step:
        with within(_CARD, device):
            for row in rows:
                if row.runs:
                    with attempt(row):
                        _find_longest(row, policy, session.deadline)


def _compare(rows: Sequence[Row], policy: Policy) -> None:
    """Compare the loss and the gradient of all weights with an exact head."""
    problem = policy.off_policy()
    exact = policy.result(reference, problem)
    for row in rows:
        if row.runs:
            with attempt(row):
                found = policy.result(PROVIDERS[row.provider].run, problem)
                row.errors = compare_steps(found, exact)
                row.leave_out("wrong", why_wrong(row.errors, policy.case.dtype))


def _find_longest(row: Row, policy: Policy, deadline: float) -> None:
    case = policy.case
    fits, fails = longest(partial(policy.fits, row.provider), case.step, case.most, deadline)
    row.info |= {"longest": fits, "too_long": fails, "card_bytes": _CARD}
    at_least = " or more" * (fails is None or fails - fits > case.step)
    row.cells[f"longest sequence in {_CARD >> 30} GiB"] = f"{fits:,}{at_least}"


def longest(
    fits: Callable[[int], bool], step: int, most: int, deadline: float
) -> tuple[int, int | None]:
    """Return the largest multiple of ``step`` that fits, and the smallest that doesn't.

    They are further apart if the time is up; None: ``most`` fits.
    """
    low, high = 0, most + step
    while high - low > step and time.monotonic() < deadline:
        middle = (low + high) // 2 // step * step
        if fits(middle):
            low = middle
        else:
            high = middle
    return low, high if high <= most else None


@contextmanager
def within(size: int, device: str) -> Iterator[None]:
    """Limit the bytes of a GPU that torch may allocate."""
    if device != "cuda":
        yield
        return
    free(device)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Policy:
    """The model, and its steps."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self._device = case, device
        self._model = make_model(case, device)

    def step(self, name: str, tokens: int) -> None:
        """Compute all gradients of an on-policy loss on a sequence."""
        self._model.zero_grad(set_to_none=True)
        self._take(PROVIDERS[name].run, self._pose(tokens))

    def growth(self, name: str) -> int:
        """Return by how many bytes a step grows the memory beyond the weights."""
        grown = cuda_growth if self._device == "cuda" else resident_growth
        self._model.zero_grad(set_to_none=True)
        return grown(partial(self.step, name, self.case.tokens))[1]

    def fits(self, name: str, tokens: int) -> bool:
        """Return whether a step fits into the memory."""
        self._model.zero_grad(set_to_none=True)
        free(self._device)
        try:
            self.step(name, tokens)
        except torch.OutOfMemoryError:
            return False
        return True

    def result(self, run: Run, problem: Problem) -> StepResult:
        """Return the loss and the gradient of all weights."""
        self._model.zero_grad(set_to_none=True)
        found = self._take(run, problem)
        assert found.loss is not None
        return found.loss, take_gradient(self._model.parameters())

    def off_policy(self) -> Problem:
        """Return a short sequence with clipped tokens, none of them near its bound."""
        problem = self._pose(self.case.checked)
        scored = replace(
            problem,
            case=replace(problem.case, work=WORKS["logprobs"]),
            hidden=self._states(problem).detach(),
            weight=self._weight.detach(),
        )
        logprobs = reference(scored).logprobs
        assert logprobs is not None
        ratios = torch.tensor(LOG_RATIOS, device=self._device)
        every = torch.arange(logprobs.shape[1], device=self._device) % len(ratios)
        return replace(problem, old_logprobs=logprobs.float() - ratios[every])

    @property
    def _weight(self) -> Tensor:  # (V, D), also the embedding's
        return self._model.get_output_embeddings().weight

    def _states(self, problem: Problem) -> Tensor:  # (1, L, D)
        # a target is the next id
        ids = problem.target.roll(1, dims=1)
        return self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def _pose(self, tokens: int) -> Problem:
        """Return the problem of the head, without its hidden states."""
        case = self.case
        generator = torch.Generator().manual_seed(_SEED)
        target = torch.randint(case.head.vocabulary, (1, tokens), generator=generator)
        none = torch.empty(0, device=self._device)
        return Problem(
            case=make_case("dapo", case.head.name, tokens, case.dtype),
            hidden=none,
            weight=none,
            target=target.to(self._device),
            mask=torch.ones_like(target, dtype=torch.bool, device=self._device),
            advantages=torch.ones(1, device=self._device),
            old_logprobs=None,
            ref_logprobs=None,
            dlogprobs=none,
        )

    def _take(self, run: Run, problem: Problem) -> Result:
        """Run the body, the head with its loss, and both backwards."""
        hidden, weight = self._states(problem), self._weight
        leaves = {"hidden": hidden, "weight": weight}
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        found = run(replace(problem, **leaves))
        assert found.dhidden is not None and found.dweight is not None
        hidden.backward(found.dhidden.to(hidden.dtype))
        assert weight.grad is not None  # the embedding's
        weight.grad += found.dweight
        return found


def make_model(case: Case, device: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=case.head.vocabulary,
        hidden_size=case.head.hidden,
        intermediate_size=case.body.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.body.heads,
        num_key_value_heads=1,
        head_dim=case.body.head_dim,
        query_pre_attn_scalar=case.body.head_dim,
        sliding_window=case.body.window,
        max_position_embeddings=max(case.most, case.tokens),
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[case.dtype], attn_implementation="sdpa"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def growth(case: Case, device: str, name: str) -> int:
    """Return by how many bytes an otherwise idle process grows in a step."""
    for each in (
        *CASES["tiny"],
        case,
    ):  # after the first step, libraries are loaded and threads started
        grown = Policy(each, device).growth(name)
    return grown


test_vocabulary = check_row
