"""LogprobsPlan: how the statistics of a head's rows are computed, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grpo_kernels.backends import OutputSpec, why_backend
from grpo_kernels.engine.gradients import Needs
from grpo_kernels.engine.options import RunOptions
from grpo_kernels.engine.route import Route, choose_route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.saved_for_backward import OF_MASK, SavedForBackward
from grpo_kernels.head import Head


@dataclass(frozen=True, kw_only=True)
class LogprobsPlan:
    """The plan of a ``linear_logprobs`` call. Print it to see what runs, and why."""

    head: Head
    route: Route
    needs: Needs
    tokens: int  # rows with a target
    wanted: OutputSpec = OutputSpec()  # noqa: RUF009
    masked: bool = False  # log-probabilities over a sampling mask are asked for

    @staticmethod
    def of(rows: Rows, options: RunOptions, wanted: OutputSpec, needs: Needs) -> LogprobsPlan:
        """Choose for rows.

        Raises:
            ValueError: the backend cannot run, or not as asked for; the workspace is too small.
        """
        masked = rows.sampling_mask is not None
        return LogprobsPlan(
            head=rows.head,
            route=choose_route(rows.hidden.dtype, rows.head, options, wanted.tiled or masked),
            needs=needs,
            tokens=rows.count,
            wanted=wanted,
            masked=masked,
        )

    @cached_property
    def saving(self) -> SavedForBackward:
        """What the forward keeps for the backward."""
        size = self.tokens, self.head.weight.shape[1]
        return SavedForBackward.of(*size, self.route, self.needs, OF_MASK if self.masked else None)

    @property
    def backend(self) -> str:
        return self.route.backend.name

    @property
    def forward(self) -> str:
        """How statistics are formed: with a tile of logits, without one, from all logits."""
        return self.saving.route(self.route).forward

    @property
    def precision(self) -> str:
        return self.route.precision

    @cached_property
    def fingerprint(self) -> str:
        """A line to log with a run: where it differs, so may the bits."""
        return self.saving.route(self.route).fingerprint(self.head)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why it is so, a sentence each."""
        route, device = self.route, self.head.weight.device
        reasons = why_backend(route.backend, route.options.backend, device, route.dtype)
        if self.wanted.tiled or self.masked:
            reasons.append("a tile of logits: some of what is asked for is read from it")
        return (*reasons, str(self.saving))

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *(f"  - {reason}" for reason in self.reasons)])

    def _lines(self) -> list[str]:
        return [
            f"backend   {self.backend}",
            f"forward   {self.forward}, precision={self.precision!r}",
            f"numerics  {self.fingerprint}",
        ]

    __repr__ = __str__
