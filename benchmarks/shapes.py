"""Cases: a head, a number of tokens, a dtype, and a work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks import real_text
from grpo_kernels import LossConfig
from grpo_kernels.tools import device_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LONGEST = 1024  # tokens of a sequence


class Spread(NamedTuple):
    """Standard deviations of normal logits."""

    competing: float
    others: float = 0.0
    every: int = 1  # one id in so many competes


# Inputs by name; targets are sampled from them. With a vocabulary of 152k the mean entropies are
# near 0.3 nats, as for a policy in RL, and 1.9, as for plain text. If "policy-like" logits were as
# large for all ids, many probabilities would be subnormal, which CPUs multiply slowly and which
# real probabilities are not. "peaked" raises its targets over a flat tail, and a fifth of the
# "mostly-decided" tokens is open; see ``problem.py``.
DECIDED = "mostly-decided"
SPREADS = {
    "peaked": Spread(2.0),
    "policy-like": Spread(16.0, others=2.0, every=512),
    "text-like": Spread(6.8),
    DECIDED: Spread(0.0),  # see ``problem._make_policy``
}
REAL = "real-text"  # a pretrained model's states before its own samples, see ``real_text.py``
INPUTS = (*SPREADS, REAL)


@dataclass(frozen=True)
class Model:
    """The LM head of a model."""

    name: str
    hidden: int  # D
    vocabulary: int  # V
    softcap: float | None = None


MODELS = {
    model.name: model
    for model in (
        Model("tiny", 32, 257),
        Model("small", 256, 32000),
        Model("smollm2-135m", 576, 49152),
        Model("qwen2.5-0.5b", 896, 151936),
        Model("qwen3-0.6b", 1024, 151936),
        Model("qwen3-1.7b", 2048, 151936),
        Model("llama-3.2-1b", 2048, 128256),
        Model("gemma-2-2b", 2304, 256000, softcap=30.0),
        Model("gemma-3-1b", 1152, 262144),
        Model("gemma-3-4b", 2560, 262208),
        Model("qwen3-8b", 4096, 151936),
    )
}


@dataclass(frozen=True)
class Work:
    """One computation over the same inputs."""

    name: str
    title: str
    kind: str  # "forward" | "backward" | "mean" | "loss" | "divergence"
    entropy: bool = False  # the outputs include entropies
    loss: LossConfig | None = None  # for "loss"
    frozen: bool = False  # the head's weight needs no gradient
    rows: str = "all"  # "all" | "masked" | "zero": what half of the tokens are

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of a result that are compared with the reference."""
        if self.kind == "forward":
            return ("logprobs", "entropy") if self.entropy else ("logprobs",)
        value = "logprobs" if self.kind == "backward" else "loss"
        return (value, "dhidden") if self.frozen else (value, "dhidden", "dweight")


def _loss(name: str, beta: float = 0.0, frozen: bool = False, rows: str = "all") -> Work:
    what = _PARTS.get(rows, f"beta {beta:g}, {'frozen' if frozen else 'full'} head")
    tags = [name, "kl" * bool(beta), "frozen" * frozen, rows * (rows in _PARTS)]
    title = f"{name} loss, {what}: forward + backward"
    config = LossConfig(loss_type=name, beta=beta, epsilon=0.2)
    return Work("-".join(filter(None, tags)), title, "loss", False, config, frozen, rows)


_LOSSES = ("dapo", "gspo")
_PARTS = {"masked": "half of the tokens masked", "zero": "half at zero advantage"}
_UPSTREAM = "log-probabilities, forward + backward of any upstream gradient"
_NLL = "mean negative log-likelihood, as in cross-entropy kernels, forward + backward"
_ENTROPY = "log-probabilities and entropy, no gradient"
WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Work("logprobs", "log-probabilities, no gradient", "forward"),
        Work("logprobs-entropy", _ENTROPY, "forward", entropy=True),
        Work("logprobs-grad", _UPSTREAM, "backward"),
        Work("logprobs-grad-frozen", "the same before a frozen head", "backward", frozen=True),
        Work("nll", _NLL, "mean"),
        *(_loss(*each) for each in product(_LOSSES, (0.0, 0.04), (False, True))),
        *(_loss(name, rows=rows) for name, rows in product(_LOSSES, _PARTS)),
    )
}


@dataclass(frozen=True)
class Case:
    """One table: sequences of one padded length before one head, and how thorough it is."""

    model: Model
    tokens: int  # T, padding included; a multiple of 16
    dtype: str  # a name of DTYPES
    work: Work
    inputs: str = "peaked"  # one of INPUTS
    # also measured on a CPU, which needs a process for each provider
    memory: bool = field(default=False, compare=False)
    # includes providers that compile for long or need a process; runs all rounds
    slow: bool = field(default=False, compare=False)
    title: str = ""  # of a changed problem
    change: Callable[[Any], Any] | None = field(default=None, compare=False)  # of the usual problem

    def __post_init__(self) -> None:
        assert self.inputs in INPUTS
        assert self.tokens % 16 == 0 and self.tokens % self.sequences == 0

    @property
    def sequences(self) -> int:
        return max(4, self.tokens // _LONGEST)

    @property
    def length(self) -> int:
        return self.tokens // self.sequences

    def unavailable(self, device: str) -> str | None:
        """Return why inputs are missing, or memory even for the smallest provider."""
        if self.inputs == REAL and (reason := real_text.absent(min(self.tokens, real_text.ROWS))):
            return reason
        weight = self.model.vocabulary * self.model.hidden
        states = self.tokens * self.model.hidden
        # inputs and gradients, an fp32 accumulator, and three times fp64 for the reference
        needed = (weight + states) * (2 * DTYPES[self.dtype].itemsize + 4 + 24)
        if needed <= 0.8 * device_memory(device):
            return None
        return f"needs {needed / 2**30:.0f} GiB of memory"

    def facts(self) -> dict[str, Any]:
        """Return the facts as a result file holds them."""
        facts = {"work": self.work.name, "model": self.model.name, "tokens": self.tokens}
        facts |= {name: getattr(self.model, name) for name in ("hidden", "vocabulary", "softcap")}
        facts |= {"dtype": self.dtype, "inputs": self.inputs}
        return facts | ({"kernel": self.title} if self.title else {})

    def __str__(self) -> str:
        inputs = "" if self.inputs == "peaked" else f"-{self.inputs}"
        title = f"{self.title}, " if self.title else ""
        return f"{title}{self.work.name}-{self.model.name}-{self.tokens}-{self.dtype}{inputs}"


@dataclass(frozen=True)
class Shape:
    """A case that consists of numbers: its facts, and values that a result file doesn't have."""

    name: str
    known: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return (self.known | self.more)[name]

    def facts(self) -> dict[str, Any]:
        return self.known

    def __str__(self) -> str:
        return self.name


def make_case(
    work: str, model: str, tokens: int, dtype: str, inputs: str = "peaked", **thoroughly: bool
) -> Case:
    return Case(MODELS[model], tokens, dtype, WORKS[work], inputs, **thoroughly)
