"""One TRL trainer per precision and process."""

from __future__ import annotations

import pytest
import torch
from trl_driver import Trl


@pytest.fixture(scope="session")
def trl_by_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Trl]:
    return {
        dtype: Trl(tmp_path_factory.mktemp("trl"), dtype)
        for dtype in (torch.float32, torch.float64)
    }
