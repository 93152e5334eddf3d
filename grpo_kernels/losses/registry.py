"""The named losses: the surrogate, defaults and paper of each ``loss_type``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from grpo_kernels.common import check_name
from grpo_kernels.losses.gates import Cppo, DppoKl, DppoTv, IcePop, Ipo, KPop, Trm, Vaco
from grpo_kernels.losses.surrogates import (
    Aspo,
    CeGppo,
    Cispo,
    Clip,
    Fipo,
    Gmpo,
    Pg,
    Sapo,
    Surrogate,
    Topr,
    Vespo,
)
from grpo_kernels.losses.terms import AGGREGATIONS, RATIO_LEVELS, RatioLevel


@dataclass(frozen=True)
class NamedLoss:
    """The surrogate and defaults of a ``loss_type``."""

    surrogate: type[Surrogate]
    aggregation: str  # a name in AGGREGATIONS
    source: str  # the paper
    importance_sampling_level: str = "token"
    bypass_mode: bool = False  # the ratio is against the rollout engine, not the old policy

    @property
    def ratio_level(self) -> RatioLevel:
        """The ratio level that ``importance_sampling_level`` names."""
        return RATIO_LEVELS[self.importance_sampling_level]

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the surrogate's settings."""
        return tuple(item.name for item in fields(self.surrogate))


def _gated(surrogate: type[Surrogate], source: str) -> NamedLoss:
    return NamedLoss(surrogate, "window_token_mean", source, bypass_mode=True)


LOSSES: dict[str, NamedLoss] = {
    "grpo": NamedLoss(Clip, "sequence_mean", "DeepSeekMath, arXiv:2402.03300"),
    "bnpo": NamedLoss(Clip, "token_mean", "arXiv:2506.02864"),
    "dr_grpo": NamedLoss(Clip, "fixed_length", "Dr. GRPO, arXiv:2503.20783"),
    "dapo": NamedLoss(Clip, "window_token_mean", "arXiv:2503.14476"),
    "luspo": NamedLoss(Clip, "sequence_sum", "arXiv:2602.05261", "sequence"),
    "gspo": NamedLoss(Clip, "sequence_mean", "arXiv:2507.18071", "sequence"),
    "cispo": NamedLoss(Cispo, "window_token_mean", "MiniMax-M1, arXiv:2506.13585"),
    "sapo": NamedLoss(Sapo, "sequence_mean", "arXiv:2511.20347"),
    "vespo": NamedLoss(Vespo, "window_token_mean", "arXiv:2602.10693"),
    "gmpo": NamedLoss(Gmpo, "sequence_mean", "arXiv:2507.20673"),
    "pg": NamedLoss(Pg, "window_token_mean", "arXiv:2504.02546"),
    "topr": NamedLoss(Topr, "window_token_mean", "arXiv:2503.14286"),
    "ce_gppo": NamedLoss(CeGppo, "window_token_mean", "arXiv:2509.20712"),
    "aspo": NamedLoss(Aspo, "window_token_mean", "arXiv:2510.06062"),
    "fipo": NamedLoss(Fipo, "window_token_mean", "arXiv:2603.19835"),
    "dppo_tv": _gated(DppoTv, "DPPO, arXiv:2602.04879"),
    "dppo_kl": _gated(DppoKl, "DPPO, arXiv:2602.04879"),
    "ipo": _gated(Ipo, "prime-rl"),
    "icepop": _gated(IcePop, "arXiv:2510.18855"),
    "kpop": _gated(KPop, "ringtech.notion.site/kpop"),
    "trm": _gated(Trm, "arXiv:2512.23075"),
    "vaco": _gated(Vaco, "arXiv:2603.01365"),
    "cppo": _gated(Cppo, "arXiv:2606.10968"),
}


def register_loss(name: str, loss: NamedLoss) -> None:
    """Register ``loss`` under ``name`` for configs, the command line, tests and benchmarks.

    If a surrogate's class is defined again, for example by running a notebook cell twice, it
    replaces the earlier definition.

    Raises:
        ValueError: the name is taken, or a part of the loss is unknown.
    """
    if name in LOSSES and not _is_defined_again(LOSSES[name], loss):
        raise ValueError(f"loss {name!r} is already registered")
    if not (isinstance(loss.surrogate, type) and issubclass(loss.surrogate, Surrogate)):
        raise ValueError(f"surrogate: expected a subclass of Surrogate, got {loss.surrogate!r}")
    check_name("aggregation", loss.aggregation, AGGREGATIONS)
    check_name("importance_sampling_level", loss.importance_sampling_level, RATIO_LEVELS)
    LOSSES[name] = loss


def _is_defined_again(before: NamedLoss, loss: NamedLoss) -> bool:
    """Return whether the surrogate is a later definition of the same class."""
    old, new = before.surrogate, loss.surrogate
    same = (old.__module__, old.__qualname__) == (new.__module__, getattr(new, "__qualname__", ""))
    return same and new is not old
