"""Runs named cases on real ranks: one call, all cases, and each rank's verdict on each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist

from tests.support import launch

Case = Callable[[], None]
Cases = Callable[[], Mapping[str, Case]]
_PASSED = ""


def run_on_ranks(cases: Cases, size: int) -> dict[str, str]:
    """Run all ``cases`` on ``size`` processes; return the failures of each case, "" for none."""
    verdicts = launch.run(_verdicts, cases, processes=size)
    return {
        name: "\n".join(f"rank {r}: {v[name]}" for r, v in enumerate(verdicts) if v[name])
        for name in verdicts[0]
    }


def run_alone(cases: Cases) -> dict[str, str]:
    """Run all ``cases`` in a process of their own; return the failures of each, "" for none."""
    with launch.ranks(1) as alone:
        [verdicts] = alone.run(_verdicts, cases)
    return verdicts


def _verdicts(cases: Cases) -> dict[str, str]:
    verdicts = {}
    for name, case in cases().items():
        verdicts[name] = _verdict(case)
        if dist.is_initialized():  # who fails alone does not meet the next case of the others
            dist.barrier()
    return verdicts


def _verdict(case: Case) -> str:
    torch.manual_seed(0)
    try:
        case()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return _PASSED


def expect(match: str, call: Callable[[], object]) -> None:
    """Assert that a call raises a ValueError with such a message."""
    with pytest.raises(ValueError, match=match):
        call()
