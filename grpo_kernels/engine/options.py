"""RunOptions: how a call is computed. Exactness depends on ``precision`` and ``backward``."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kernels.head import PRECISIONS

SCHEDULES = ("auto", "one_pass", "two_pass")
METRIC_ROWS = ("all", "active")


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A backward by the entries of the softmax that matter: unbiased, with a bounded error.

    Of a row's V probabilities only some are kept for the backward: the large ones, and a sample of
    the small ones whose mean is right. A GEMM of a gradient becomes a sparse product. Rows that
    would need too many entries, as that of a flat distribution, take the exact backward.

    Args:
        tolerance: the expected relative error of the gradient of the logits, in the Frobenius norm
            over all rows; that of the other gradients is near it. Statistics and losses stay exact.
        slots: the most entries of a row. A row takes 8 bytes of memory for each.
        exact_weight: the gradients of the head (weight, bias and LoRA's B) stay exact, for
            optimizers that divide by a gradient's usual size, as Adam does. False: they take a
            sparse product, too, in place of the last GEMM of the backward.
        seed: of the sample, which also depends on the row and on the policy.

    Raises:
        ValueError: the tolerance is not in (0, 1), or ``slots`` or ``seed`` is no number of such.
    """

    tolerance: float = 2e-3
    slots: int = 1024
    exact_weight: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.tolerance, float) and 0 < self.tolerance < 1):
            raise ValueError(f"tolerance: expected a float in (0, 1), got {self.tolerance!r}")
        if self.exact_weight not in (True, False):
            raise ValueError(f"exact_weight: expected True or False, got {self.exact_weight!r}")
        if not _is_int(self.slots) or self.slots < 1:
            raise ValueError(f"slots: expected an int of at least 1, got {self.slots!r}")
        if not _is_int(self.seed) or not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed: expected an int in [0, 2^32), got {self.seed!r}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The caller's options for how a call runs; ``linear_policy_loss`` describes each.

    Raises:
        ValueError: a name is unknown, or a size is no number of bytes.
    """

    precision: str = "fp32"
    backend: str = "auto"
    max_workspace_bytes: int | None = None
    batch_invariant: bool = False
    schedule: str = "auto"
    metric_rows: str = "all"
    backward: str | Bounded = "exact"
    activation_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("precision", PRECISIONS),
            ("schedule", SCHEDULES),
            ("metric_rows", METRIC_ROWS),
            ("batch_invariant", (True, False)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(str, known))}; "
                    f"got {getattr(self, name)!r}"
                )
        if not isinstance(self.backend, str):
            raise ValueError(f"backend: expected a name, got {self.backend!r}")
        for name in ("max_workspace_bytes", "activation_bytes"):
            size = getattr(self, name)
            if size is not None and not _is_int(size):
                raise ValueError(f"{name}: expected an int or None, got {size!r}")
        if self.activation_bytes is not None and self.activation_bytes < 0:
            raise ValueError(f"activation_bytes: expected at least 0, got {self.activation_bytes}")
        if self.backward != "exact" and not isinstance(self.backward, Bounded):
            raise ValueError(f"backward: expected 'exact' or a Bounded, got {self.backward!r}")

    @property
    def bounded(self) -> Bounded | None:
        """The bounded backward, None for the exact one."""
        return self.backward if isinstance(self.backward, Bounded) else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
