"""How the statistics of a head's rows are computed, and what is saved for their gradients.

The gradient of the log-probabilities is known up to one factor per row, which the loss supplies. So
the forward can compute it while the logits are in memory, and save its product with the weight,
(T, D), if the head gets no gradient; the gradient itself, (T, V), if the caller allows the memory;
or its large entries and a sample of the small ones, if the caller allows an error. Then logits are
not computed twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from grpo_kernels.backends import OutputSpec
from grpo_kernels.engine.explain import fingerprint, logprobs_lines, logprobs_reasons
from grpo_kernels.engine.options import Bounded, RunOptions
from grpo_kernels.engine.route import Route, choose_route
from grpo_kernels.engine.rows import Needs
from grpo_kernels.engine.weight_sum import WeightGrad
from grpo_kernels.head import Head, leading_dim, stats_dtype

NOTHING, HIDDEN, LOGITS, ENTRIES = "nothing", "dhidden", "dlogits", "entries"
OF_ALL_ROWS = (HIDDEN, ENTRIES)  # saved also for rows without a target, as zeros
OF_MASK = "the gradient through a sampling mask differs from the gradient of logprobs"
# Rows of a chunk whose exponentials are read for entries: a whole wave of a GPU's tiles.
ENTRY_ROWS = 2048
OF_ENTROPY = "the gradient through the entropy differs from the gradient of logprobs"


@dataclass(frozen=True, kw_only=True)
class SavedForBackward:
    """The tensor that a forward saves for its backward, and why."""

    kind: str = NOTHING
    shape: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32
    gemms: int = 0  # over the vocabulary, forward and backward together
    with_gradient: bool = False  # statistics come with the gradient of log-probabilities
    why: str | None = None
    too_large: SavedForBackward | None = None  # the tensor that activation_bytes has no room for

    @staticmethod
    def of(
        tokens: int,
        depth: int,
        route: Route,
        needs: Needs,
        why_not: str | None = None,
        is_plain: bool = True,
    ) -> SavedForBackward:
        """Choose for a call with ``tokens`` rows of the hidden size ``depth``.

        ``why_not``: why nothing can be saved, if the caller knows a reason. ``is_plain``: only the
        statistics of every call are requested, over all ids.
        """
        gemms = 1 + needs.hidden + needs.weight
        why_not = why_not or route.why_no_gradients
        if not needs.any:
            return SavedForBackward(gemms=1, why="there is no backward")
        if why_not is not None:
            return SavedForBackward(gemms=gemms + 1, why=why_not)
        bounded = route.options.bounded
        budget = route.options.activation_bytes
        if bounded is not None:
            anew = 1 + needs.weight if bounded.exact_weight and needs.of_head else 0
            shape = tokens, 2 * min(bounded.slots, route.columns) + 5
            dtype = kept_dtype(stats_dtype(route.dtype))
            return SavedForBackward(
                kind=ENTRIES,
                shape=shape,
                dtype=dtype,
                gemms=1 + anew,
                with_gradient=route.reads_once and is_plain,
            )
        if needs.of_head or needs.lora_a:
            shape = tokens, leading_dim(route.max_local_vocab, route.dtype, route.device)
            kept = SavedForBackward(kind=LOGITS, shape=shape, dtype=route.dtype, gemms=gemms)
            fits = budget is not None and kept.nbytes <= budget
        else:
            is_fp16 = route.dtype == torch.float16  # will be scaled later
            dtype = stats_dtype(route.dtype) if is_fp16 else route.dtype
            kept = SavedForBackward(kind=HIDDEN, shape=(tokens, depth), dtype=dtype, gemms=gemms)
            fits = budget is None or kept.nbytes <= budget
        return kept if fits else SavedForBackward(gemms=gemms + 1, too_large=kept)

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return self.kind != NOTHING

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def route(self, route: Route) -> Route:
        """Return the route of a forward that saves this; statistics from its tile are as exact."""
        if self.kind == NOTHING or route.options.batch_invariant:
            return route
        route = replace(route, has_tile=True)
        return route.storing(ENTRY_ROWS) if self.with_gradient and route.stores else route


def kept_dtype(wide: torch.dtype) -> torch.dtype:
    """Return the integer dtype that holds ids, and the bits of floats of the dtype ``wide``."""
    return torch.int64 if wide == torch.float64 else torch.int32


def needs_of_gemms(needs: Needs, bounded: Bounded | None) -> Needs:
    """Return the gradients that are computed from the gradient of all logits."""
    if bounded is None:
        return needs
    return needs.of_head_alone if bounded.exact_weight and needs.of_head else Needs()


@dataclass(frozen=True, kw_only=True)
class CallPlan(ABC):
    """The plan of a call at a head. Print it to see what runs, and why."""

    head: Head
    route: Route
    needs: Needs
    tokens: int  # rows in the GEMMs of the gradients
    weight_grad: WeightGrad = WeightGrad()  # noqa: RUF009

    @property
    def options(self) -> RunOptions:
        """The arguments that say how a call runs."""
        return self.route.options

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.route.backend.name

    @property
    def precision(self) -> str:
        """The precision of the GEMMs over the vocabulary."""
        return self.route.precision

    @property
    def needs_of_gemms(self) -> Needs:
        """The gradients that are computed from the gradient of all logits."""
        return needs_of_gemms(self.needs, self.options.bounded)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A line to log with a run: runs with different fingerprints may differ bitwise."""

    @property
    @abstractmethod
    def reasons(self) -> tuple[str, ...]:
        """Why the call runs as planned, a sentence each."""

    @property
    @abstractmethod
    def lines(self) -> list[str]:
        """The plan as a table."""

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"  - {reason}" for reason in self.reasons)])

    __repr__ = __str__


@dataclass(frozen=True, kw_only=True, repr=False)
class LogprobsPlan(CallPlan):
    """The plan of a ``linear_logprobs`` call. Print it to see what runs, and why.

    Attributes:
        backend: name of the backend.
        precision: precision of the GEMMs over the vocabulary.
        saved: what the forward saves for the backward: ``saved.kind``, ``saved.nbytes``,
            ``saved.gemms`` (over the vocabulary, forward and backward together) and ``saved.why``.
        fingerprint: a line to log with a run; runs with different ones may differ bitwise.
        reasons: why the call runs as planned, a sentence each.
        route: backend, forward and tile. It and the other attributes are internal.
    """

    outputs: OutputSpec = OutputSpec()  # noqa: RUF009
    masked: bool = False  # log-probabilities over a sampling mask are requested
    why_recompute: str | None = None  # why the forward can save nothing for the backward

    @staticmethod
    def of(
        *,
        dtype: torch.dtype,  # of the hidden states
        head: Head,
        tokens: int,  # rows with a target
        options: RunOptions,
        needs: Needs,
        outputs: OutputSpec = OutputSpec(),  # noqa: B008
        masked: bool = False,
    ) -> LogprobsPlan:
        """Choose how these rows run.

        Raises:
            ValueError: the backend cannot run as requested, or the workspace is too small.
        """
        route = choose_route(dtype, head, options, outputs.tiled or masked)
        return LogprobsPlan(
            head=head,
            route=route,
            needs=needs,
            tokens=tokens,
            outputs=outputs,
            masked=masked,
            why_recompute=OF_MASK if masked else None,
        )

    @cached_property
    def saved(self) -> SavedForBackward:
        """What the forward saves for the backward."""
        return SavedForBackward.of(
            tokens=self.tokens,
            depth=self.head.weight.shape[1],
            route=self.route,
            needs=self.needs,
            why_not=self.why_recompute,
            is_plain=self.outputs == OutputSpec() and not self.masked,
        )

    @property
    def forward_route(self) -> Route:
        """The route of the forward."""
        return self.saved.route(self.route)

    @cached_property
    def fingerprint(self) -> str:
        """A line to log with a run: runs with different fingerprints may differ bitwise."""
        return fingerprint(self.forward_route, self.head)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the call runs as planned, a sentence each."""
        return tuple(logprobs_reasons(self))

    @property
    def lines(self) -> list[str]:
        """The plan as a table."""
        return logprobs_lines(self)
