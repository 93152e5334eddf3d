"""Options of a head, by name, for tests of log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 1.3},
    "softcapped": {"softcap": 3.0, "temperature": 1.7, "logit_scale": 0.5},
    "per_token": {"softcap": 5.0},  # and a temperature of each target
}


def head_options(name: str, target: Tensor) -> dict[str, float | Tensor]:
    if name != "per_token":
        return dict(HEADS[name])
    generator = torch.Generator().manual_seed(7)
    temperature = 0.5 + torch.rand(target.shape, generator=generator)
    return {**HEADS[name], "temperature": temperature.to(target.device)}
