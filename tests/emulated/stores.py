"""What row kernels do for each logit, counted as they run: for :mod:`tests.emulated.plugin`."""

from __future__ import annotations

import pytest

from tests.emulated import device
from tests.emulated.work import DTYPES, OF_ENTRIES, ROWS, entries, one_read, per_logit

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


@pytest.mark.parametrize(("dtype", "stored", "most"), [("bf16", True, 12), ("fp32", False, 17)])
def test_triton_chooses_entries_in_one_read(dtype: str, stored: bool, most: int) -> None:
    """Those of a row of exponentials take less than those of its logits."""
    launches = []
    for columns in OF_ENTRIES:
        before = len(device.LAUNCHES)
        entries(stored)(columns, DTYPES[dtype])
        launches.append(device.LAUNCHES[before:])
    works = per_logit(*launches, ROWS * (OF_ENTRIES[1] - OF_ENTRIES[0]))
    [mark] = [work for work in works if work["kernel"] == "_mark_kernel"]
    assert 5 < sum(mark["instructions"].values()) <= most, mark
    assert mark["read"] == (2 if stored else 4), mark  # bytes
    [listing] = [work for work in works if work["kernel"] == "_list_kernel"]
    assert 0.5 < sum(listing["instructions"].values()) <= 2.2, listing
