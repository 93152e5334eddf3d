"""One TRL trainer per precision and process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.parity.trl_driver import STEPS_PER_GENERATION, Trl


@pytest.fixture(scope="session")
def trl_by_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Trl]:
    return {
        dtype: Trl(tmp_path_factory.mktemp("trl"), dtype)
        for dtype in (torch.float32, torch.float64)
    }


@pytest.fixture
def trl(trl_by_dtype: dict[torch.dtype, Trl]) -> Iterator[Trl]:
    """Return the one in fp64; a test may give it other rollouts and another accumulation."""
    driver = trl_by_dtype[torch.float64]
    rollouts = driver.rollouts
    yield driver
    driver.rollouts = rollouts
    driver.accumulate(STEPS_PER_GENERATION, STEPS_PER_GENERATION)
