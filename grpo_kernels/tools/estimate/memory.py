"""Peak memory of a head's loss, forward and backward, of the implementations one can choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from grpo_kernels.tools.estimate import ours, peers
from grpo_kernels.tools.estimate.shape import HeadShape, Moment, Setting

# name -> what can be the peak. A loss of token scope, or one whose sequences fit into a tile:
# others of ours run as "ours-two-pass".
_FORMULAS: dict[str, Callable[[HeadShape, Setting], list[Moment]]] = {
    "eager": peers.eager,
    "eager-entropy": partial(peers.eager, entropy=True),
    "trl": peers.trl,
    "ours": ours.one_pass,
    "ours-input": partial(ours.one_pass, precision="input"),
    "ours-two-pass": ours.two_pass,
}
IMPLEMENTATIONS = tuple(_FORMULAS)


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes at the peak of one forward and backward."""

    inputs: int  # hidden states and weight
    returned: int  # their gradients
    extra: int  # what else is alive at the peak
    peak: str  # when that is

    @property
    def growth(self) -> int:
        """From the inputs alone to the peak."""
        return self.returned + self.extra

    @property
    def total(self) -> int:
        return self.inputs + self.growth


def predict_head_memory(
    implementation: str,
    head: HeadShape,
    tokens: int,
    *,
    device: str = "cuda",
    max_workspace_bytes: int | None = None,
    threads: int | None = None,
) -> MemoryPrediction | None:
    """Peak memory of a loss of ``tokens`` valid tokens, all with a gradient.

    Vectors of one value per token are left out, and on a GPU the workspaces of libraries.

    Args:
        implementation: one of ``IMPLEMENTATIONS``.
        head: the shape.
        tokens: T.
        device: "cpu" (resident memory) or "cuda" (the caching allocator's).
        max_workspace_bytes: as in ``linear_policy_loss``; of ours only.
        threads: of a CPU; None: as many as torch uses here.

    Returns:
        The prediction; None where there is no formula for ``implementation``.

    Raises:
        ValueError: a number or name is out of range; the message names the argument.
    """
    formula = _FORMULAS.get(implementation)
    if formula is None:
        return None
    setting = Setting(
        tokens=tokens,
        device=device,
        threads=torch.get_num_threads() if threads is None else threads,
        max_workspace_bytes=max_workspace_bytes,
    )
    return _prediction(formula(head, setting), head, tokens)


def predict_schedule_memory(
    schedule: str, head: HeadShape, setting: Setting, precision: str
) -> MemoryPrediction:
    """The same of one of our schedules, "one_pass" or "two_pass", by all that is known of it."""
    formula = {"one_pass": ours.one_pass, "two_pass": ours.two_pass}[schedule]
    return _prediction(formula(head, setting, precision), head, setting.tokens)


def _prediction(moments: list[Moment], head: HeadShape, tokens: int) -> MemoryPrediction:
    returned = head.returned_bytes(tokens)
    peak = max([*moments, Moment("the end", returned)], key=lambda moment: moment.bytes)
    return MemoryPrediction(head.input_bytes(tokens), returned, peak.bytes - returned, peak.when)


def largest_micro_batch(fits: Callable[[int], bool]) -> int:
    """The largest number of tokens that ``fits``; 0 when not even one does.

    ``fits`` must be true up to some number and false from there on.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
