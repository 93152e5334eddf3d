"""The works: the parts of a GRPO step that every provider computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from grpo_kernels import LossConfig


@dataclass(frozen=True)
class Work:
    """One computation over the same inputs."""

    name: str
    title: str
    kind: str  # "forward" | "backward" | "mean" | "loss"
    entropy: bool = False  # the entropies are wanted beside the log-probabilities
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
_NLL = "mean negative log-likelihood (what cross-entropy kernels do), forward + backward"
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
