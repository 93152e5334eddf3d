"""What all tests of hosts run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # some hosts compile their losses
        yield
