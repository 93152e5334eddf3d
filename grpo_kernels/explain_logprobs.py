"""explain_logprobs: which forward runs, said before any work."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_kernels.backends.base import Transform
from grpo_kernels.engine.fingerprint import fingerprint, forward_name
from grpo_kernels.engine.route import choose_path
from grpo_kernels.head.checks import prepare_head
from grpo_kernels.head.lora import HeadLoRA

_READS_A_TILE = "a tile of logits: some of what is asked for is read from it"


@dataclass(frozen=True, kw_only=True)
class LogprobsPlan:
    """What ``linear_logprobs`` will run."""

    backend: str
    forward: str  # how statistics are formed: with a tile of logits, without one, from all logits
    precision: str
    fingerprint: str  # a line to log with a run: where it differs, so may the bits
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"backend   {self.backend}",
            f"forward   {self.forward}, precision={self.precision!r}",
            f"numerics  {self.fingerprint}",
        ]
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons)])


def explain_logprobs(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    precision: str = "fp32",
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
    sampling_mask: bool = False,
    ranked: bool = False,
    batch_invariant: bool = False,
) -> LogprobsPlan:
    """The plan that :func:`linear_logprobs` would follow for the same arguments; print it.

    Its ``fingerprint`` names the kernels, their configuration, the precision and the libraries, and
    ends with a hash of these. Two runs that agree in it and in ``batch_invariant`` give the same
    row the same bits; a new driver, library or device shows in it.

    Args:
        sampling_mask: whether ``masked_logprobs`` are asked for.
        ranked: whether ``rank``, ``topk_logprobs`` or ``topk_indices`` are.
        hidden, weight, ...: as for ``linear_logprobs``.

    Raises:
        ValueError: as ``linear_logprobs`` would for these arguments.
    """
    transform = Transform(logit_scale, softcap)
    hidden, head = prepare_head(hidden, weight, bias, transform, precision, lora)
    rows = hidden.reshape(-1, hidden.shape[-1])
    path = choose_path(
        backend,
        rows,
        head,
        precision,
        max_workspace_bytes,
        batch_invariant=batch_invariant,
        sampling_mask=sampling_mask,
        ranked=ranked,
    )
    return LogprobsPlan(
        backend=path.choice.backend.name,
        forward=forward_name(path),
        precision=precision,
        fingerprint=fingerprint(path, rows, head),
        reasons=path.choice.reasons + ((_READS_A_TILE,) if sampling_mask or ranked else ()),
    )
