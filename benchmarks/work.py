"""The works: the parts of a GRPO step that every provider computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from grpo_kernels import LossConfig


@dataclass(frozen=True, kw_only=True)
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

    @property
    def gemms(self) -> int:
        """The number of GEMMs over the head that every implementation needs."""
        return 1 if self.kind == "forward" else 2 if self.frozen else 3


def _losses() -> list[Work]:
    works = []
    for name, beta, frozen in product(("dapo", "gspo"), (0.0, 0.04), (False, True)):
        tags = [name, *(["kl"] if beta else []), *(["frozen"] if frozen else [])]
        title = f"{name} loss, beta {beta:g}, {'frozen' if frozen else 'full'} head"
        works.append(
            Work(
                name="-".join(tags),
                title=f"{title}: forward + backward",
                kind="loss",
                loss=LossConfig(loss_type=name, beta=beta, epsilon=0.2),
                frozen=frozen,
            )
        )
    return works


def _partial() -> list[Work]:
    meanings = {"masked": "half of the tokens masked", "zero": "half at zero advantage"}
    return [
        Work(
            name=f"{name}-{rows}",
            title=f"{name} loss, {meaning}: forward + backward",
            kind="loss",
            loss=LossConfig(loss_type=name, epsilon=0.2),
            rows=rows,
        )
        for name in ("dapo", "gspo")
        for rows, meaning in meanings.items()
    ]


WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Work(name="logprobs", title="log-probabilities, no gradient", kind="forward"),
        Work(
            name="logprobs-entropy",
            title="log-probabilities and entropy, no gradient",
            kind="forward",
            entropy=True,
        ),
        Work(
            name="logprobs-grad",
            title="log-probabilities, forward + backward of any upstream gradient",
            kind="backward",
        ),
        Work(
            name="nll",
            title="mean negative log-likelihood (what cross-entropy kernels do), "
            "forward + backward",
            kind="mean",
        ),
        *_losses(),
        *_partial(),
    )
}
