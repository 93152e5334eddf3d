"""Named losses: a name is data, a combination of surrogate, aggregation and ratio level."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kernels.losses.ratios import RATIO_LEVELS
from grpo_kernels.losses.surrogates import SURROGATES
from grpo_kernels.losses.weights import AGGREGATIONS


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """What ``loss_type`` stands for."""

    surrogate: str
    aggregation: str
    importance_sampling_level: str = "token"
    source: str  # the paper


LOSSES: dict[str, NamedLoss] = {}


def register_loss(name: str, loss: NamedLoss) -> None:
    """Makes ``loss`` known as ``name`` to configs, the command line, tests and benchmarks.

    Raises:
        ValueError: the name is taken, or a part of the loss is unknown.
    """
    if name in LOSSES:
        raise ValueError(f"loss {name!r} is already registered")
    check_name("surrogate", loss.surrogate, SURROGATES)
    check_name("aggregation", loss.aggregation, AGGREGATIONS)
    check_name("importance_sampling_level", loss.importance_sampling_level, RATIO_LEVELS)
    LOSSES[name] = loss


def check_name(argument: str, value: object, known: dict[str, object] | dict) -> None:
    """Raises ValueError naming the argument and listing the known names."""
    if value not in known:
        raise ValueError(f"{argument}: expected one of {', '.join(sorted(known))}; got {value!r}")


for _name, _loss in {
    "grpo": NamedLoss(
        surrogate="clip", aggregation="sequence_mean", source="DeepSeekMath, arXiv:2402.03300"
    ),
    "bnpo": NamedLoss(surrogate="clip", aggregation="token_mean", source="arXiv:2506.02864"),
    "dr_grpo": NamedLoss(
        surrogate="clip", aggregation="fixed_length", source="Dr. GRPO, arXiv:2503.20783"
    ),
    "dapo": NamedLoss(surrogate="clip", aggregation="window_token_mean", source="arXiv:2503.14476"),
    "luspo": NamedLoss(
        surrogate="clip",
        aggregation="sequence_sum",
        importance_sampling_level="sequence",
        source="arXiv:2602.05261",
    ),
    "gspo": NamedLoss(
        surrogate="clip",
        aggregation="sequence_mean",
        importance_sampling_level="sequence",
        source="arXiv:2507.18071",
    ),
    "cispo": NamedLoss(
        surrogate="cispo", aggregation="window_token_mean", source="MiniMax-M1, arXiv:2506.13585"
    ),
    "sapo": NamedLoss(surrogate="sapo", aggregation="sequence_mean", source="arXiv:2511.20347"),
    "vespo": NamedLoss(
        surrogate="vespo", aggregation="window_token_mean", source="arXiv:2602.10693"
    ),
    "gmpo": NamedLoss(surrogate="gmpo", aggregation="sequence_mean", source="arXiv:2507.20673"),
    "pg": NamedLoss(surrogate="pg", aggregation="window_token_mean", source="arXiv:2504.02546"),
    "topr": NamedLoss(surrogate="topr", aggregation="window_token_mean", source="arXiv:2503.14286"),
}.items():
    register_loss(_name, _loss)
