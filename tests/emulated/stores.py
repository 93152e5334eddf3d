"""What the row kernel stores, counted as it runs: for :mod:`tests.emulated.plugin`."""

from __future__ import annotations

import pytest

from tests.emulated import device
from tests.emulated.work import DTYPES, ROWS, one_read, per_logit

_COLUMNS = 4096, 12288  # whole tiles


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_stores_a_row_of_gradients_in_vectors(dtype: str) -> None:
    launches = []
    for columns in _COLUMNS:
        before = len(device.LAUNCHES)
        one_read(columns, DTYPES[dtype])
        launches.append(device.LAUNCHES[before:])
    [work] = per_logit(*launches, ROWS * (_COLUMNS[1] - _COLUMNS[0]))
    assert 0 < work["instructions"]["store"] <= 0.25, work
    assert work["written"] == 2, work  # bytes
