"""Whole calls in Triton, forward and backward, against the oracle; also as machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_kernels import available_backends
from tests.conftest import DEVICES
from tests.net.calls import CALLS
from tests.net.cases import Case
from tests.net.checks import check


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_call(case: Case, device: str) -> None:
    check(replace(case, device=device))
