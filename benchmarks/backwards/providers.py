"""The backwards of our ops as providers, and who is measured beside them in which work."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.problem import Problem
from benchmarks.providers import PROVIDERS, bare_gemms, eager, liger, trl
from benchmarks.providers.base import Provider
from benchmarks.providers.ours import run_work
from grpo_kernels import Bounded, linear_logprobs

_UNLIMITED = 1 << 60
_TOLERANCES = ("1e-2", "2e-3", "5e-4")


@dataclass(frozen=True, kw_only=True)
class Ours(Provider):
    """One of our backwards."""

    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """The relative error that the caller allows its gradients."""
        return self.settings["backward"].tolerance if "backward" in self.settings else 0.0

    def entries(self, problem: Problem) -> list[int]:
        """Return how many entries each row keeps, -1 for one that is exact; [] of no such."""
        if not self.tolerance or problem.work.kind != "backward":
            return []
        inputs = problem.hidden, problem.weight, problem.target
        softcap, outputs = problem.softcap, ("logprobs", "entries")
        found = linear_logprobs(*inputs, softcap=softcap, outputs=outputs, **self.settings).entries
        assert found is not None
        return found.flatten().tolist()


def _ours(name: str, note: str, **settings: Any) -> Ours:
    return Ours(name=name, note=note, run=partial(run_work, settings=settings), settings=settings)


OURS: dict[str, Ours] = {
    provider.name: provider
    for provider in (
        _ours(
            "ours-again",
            "activation_bytes=0: nothing is kept, and the op's backward forms the logits again",
            activation_bytes=0,
        ),
        _ours(
            "ours-kept",
            "what the op's backward needs is kept, exact: dhidden, as by default, or with "
            "activation_bytes the logits' gradient",
            activation_bytes=_UNLIMITED,
        ),
        *(
            _ours(
                f"ours-bounded-{tolerance}",
                f"backward=Bounded(tolerance={tolerance}, exact_weight=False)",
                backward=Bounded(tolerance=float(tolerance), exact_weight=False),
            )
            for tolerance in _TOLERANCES
        ),
    )
}
USUAL = OURS["ours-bounded-2e-3"]
BARE = PROVIDERS[bare_gemms.BARE_GEMMS.name]
BARE_WORK = "logprobs"  # its bare work is one GEMM

_BOUNDED = tuple(provider for provider in OURS.values() if provider.tolerance)
_OP = (OURS["ours-again"], OURS["ours-kept"])
# the first is what the others save from
WAYS: dict[str, tuple[Provider, ...]] = {
    "logprobs-grad": (*_OP, *_BOUNDED, eager.EAGER, eager.COMPILE, trl.TRL),
    "logprobs-grad-frozen": (*_OP, USUAL, eager.EAGER),
    "dapo": (PROVIDERS["ours"], USUAL, eager.EAGER, trl.TRL, liger.LIGER),
}
# an exact backward takes as long on any inputs
OF_OTHER_INPUTS = {"logprobs-grad": (*_OP, *_BOUNDED, eager.EAGER)}


def ways(inputs: str) -> dict[str, tuple[Provider, ...]]:
    """Return who is measured on such inputs, by work."""
    return WAYS if inputs == "policy-like" else OF_OTHER_INPUTS
