"""One TRL trainer per precision and module: accelerate's state is that of whoever came last."""

from __future__ import annotations

import pytest
import torch

from tests.parity.trl_driver import Trl


@pytest.fixture(scope="module")
def trls(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Trl]:
    return {
        dtype: Trl(tmp_path_factory.mktemp("trl"), dtype)
        for dtype in (torch.float32, torch.float64)
    }


@pytest.fixture
def trl(trls: dict[torch.dtype, Trl]) -> Trl:
    return trls[torch.float64]
