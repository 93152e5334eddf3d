"""RunOptions: how a call is computed. Exactness depends on ``precision`` alone."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kernels.head import PRECISIONS

SCHEDULES = ("auto", "one_pass", "two_pass")
METRIC_ROWS = ("all", "active")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The caller's options for how a call runs; ``linear_policy_loss`` describes each.

    Raises:
        ValueError: a name is unknown, or the workspace is no number of bytes.
    """

    precision: str = "fp32"
    backend: str = "auto"
    max_workspace_bytes: int | None = None
    batch_invariant: bool = False
    schedule: str = "auto"
    metric_rows: str = "all"

    def __post_init__(self) -> None:
        for name, known in (
            ("precision", PRECISIONS),
            ("schedule", SCHEDULES),
            ("metric_rows", METRIC_ROWS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        size = self.max_workspace_bytes
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise ValueError(f"max_workspace_bytes: expected an int or None, got {size!r}")
