"""RunOptions: how a call runs. Only ``precision`` and ``backward`` affect exactness."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kernels.common import check_fields, choice, number


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A sparsified backward: large softmax entries and an unbiased sample of small ones.

    Gradient sparsification by magnitude (Wangni et al., arXiv:1710.09854). Among a row's V
    probabilities the backward keeps the large ones and a sample of the small ones, weighted so that
    the gradient is unbiased. The GEMM of a gradient becomes a sparse product. Rows that would need
    too many entries, such as a flat distribution, use the exact backward.

    Args:
        tolerance: maximum expected relative error of the gradient of the logits, in the Frobenius
            norm over all rows; the errors of the other gradients are close to it. Statistics and
            losses stay exact. With bf16 inputs and the default, the total error of a gradient is
            about 1.4 times the error of the exact backward, which is rounded, too.
        slots: maximum entries kept per row. Each needs 8 bytes.
        exact_weight: whether the gradients of the head (weight, bias and LoRA's B) stay exact, for
            optimizers such as Adam that divide by a gradient's usual size. False: they also use a
            sparse product, which replaces the last GEMM of the backward.
        seed: seed of the sample, which also depends on the row and on the policy.

    Raises:
        ValueError: the tolerance is not in (0, 1), or ``slots`` or ``seed`` is out of range.
    """

    tolerance: float = number(4e-3, "a float in (0, 1)", lambda x: 0 < x < 1)
    slots: int = number(1024, "an int of at least 1", lambda x: isinstance(x, int) and x >= 1)
    exact_weight: bool = choice(True, (True, False))
    seed: int = number(0, "an int in [0, 2^32)", lambda x: isinstance(x, int) and 0 <= x < 1 << 32)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The caller's options for how a call runs; ``linear_policy_loss`` describes each.

    Raises:
        ValueError: a name is unknown, or a size is not a byte count.
    """

    precision: str = choice("fp32", ("fp32", "input", "tf32"))
    backend: str = "auto"
    max_workspace_bytes: int | None = number(
        None, "an int or None", lambda x: isinstance(x, int), optional=True
    )
    batch_invariant: bool = choice(False, (True, False))
    schedule: str = choice("auto", ("auto", "one_pass", "two_pass"))
    metric_rows: str = choice("all", ("all", "active"))
    backward: str | Bounded = "exact"  # "exact" | "sparse" | Bounded
    activation_bytes: int | None = number(
        None, "an int >= 0 or None", lambda x: isinstance(x, int) and x >= 0, optional=True
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.backend, str):
            raise ValueError(f"backend: expected a name, got {self.backend!r}")
        if not isinstance(self.backward, Bounded) and self.backward not in ("exact", "sparse"):
            raise ValueError(
                f"backward: expected 'exact', 'sparse' or a Bounded, got {self.backward!r}"
            )

    @property
    def bounded(self) -> Bounded | None:
        """The settings of a sparse backward; None for the exact one."""
        if isinstance(self.backward, Bounded):
            return self.backward
        return Bounded() if self.backward == "sparse" else None
