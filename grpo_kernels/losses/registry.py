"""Named losses: a name is data, a combination of surrogate, aggregation and ratio level."""

from __future__ import annotations

from dataclasses import dataclass, fields

from grpo_kernels.losses.aggregation import AGGREGATIONS
from grpo_kernels.losses.checks import check_name
from grpo_kernels.losses.ratios import RATIO_LEVELS, RatioLevel
from grpo_kernels.losses.surrogates import (
    Cispo,
    Clip,
    Gmpo,
    Pg,
    Sapo,
    Surrogate,
    Topr,
    Vespo,
)


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """What ``loss_type`` stands for."""

    surrogate: type[Surrogate]
    aggregation: str  # a name of AGGREGATIONS
    importance_sampling_level: str = "token"
    source: str  # the paper

    @property
    def ratio_level(self) -> RatioLevel:
        """What ``importance_sampling_level`` stands for."""
        return RATIO_LEVELS[self.importance_sampling_level]

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the surrogate's settings."""
        return tuple(item.name for item in fields(self.surrogate))


LOSSES: dict[str, NamedLoss] = {}


def register_loss(name: str, loss: NamedLoss) -> None:
    """Make ``loss`` known as ``name`` to configs, the command line, tests and benchmarks.

    Raises:
        ValueError: the name is taken, or a part of the loss is unknown.
    """
    if name in LOSSES:
        raise ValueError(f"loss {name!r} is already registered")
    if not (isinstance(loss.surrogate, type) and issubclass(loss.surrogate, Surrogate)):
        raise ValueError(f"surrogate: expected a subclass of Surrogate, got {loss.surrogate!r}")
    check_name("aggregation", loss.aggregation, AGGREGATIONS)
    check_name("importance_sampling_level", loss.importance_sampling_level, RATIO_LEVELS)
    LOSSES[name] = loss


for _name, _loss in {
    "grpo": NamedLoss(
        surrogate=Clip, aggregation="sequence_mean", source="DeepSeekMath, arXiv:2402.03300"
    ),
    "bnpo": NamedLoss(surrogate=Clip, aggregation="token_mean", source="arXiv:2506.02864"),
    "dr_grpo": NamedLoss(
        surrogate=Clip, aggregation="fixed_length", source="Dr. GRPO, arXiv:2503.20783"
    ),
    "dapo": NamedLoss(surrogate=Clip, aggregation="window_token_mean", source="arXiv:2503.14476"),
    "luspo": NamedLoss(
        surrogate=Clip,
        aggregation="sequence_sum",
        importance_sampling_level="sequence",
        source="arXiv:2602.05261",
    ),
    "gspo": NamedLoss(
        surrogate=Clip,
        aggregation="sequence_mean",
        importance_sampling_level="sequence",
        source="arXiv:2507.18071",
    ),
    "cispo": NamedLoss(
        surrogate=Cispo, aggregation="window_token_mean", source="MiniMax-M1, arXiv:2506.13585"
    ),
    "sapo": NamedLoss(surrogate=Sapo, aggregation="sequence_mean", source="arXiv:2511.20347"),
    "vespo": NamedLoss(surrogate=Vespo, aggregation="window_token_mean", source="arXiv:2602.10693"),
    "gmpo": NamedLoss(surrogate=Gmpo, aggregation="sequence_mean", source="arXiv:2507.20673"),
    "pg": NamedLoss(surrogate=Pg, aggregation="window_token_mean", source="arXiv:2504.02546"),
    "topr": NamedLoss(surrogate=Topr, aggregation="window_token_mean", source="arXiv:2503.14286"),
}.items():
    register_loss(_name, _loss)
