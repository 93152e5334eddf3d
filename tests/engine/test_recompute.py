"""The backward in slices of the vocabulary: how it cuts, and what it copies."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import linear_logprobs
from grpo_kernels.engine import recompute
from grpo_kernels.engine.recompute import cut
from grpo_kernels.testing import make_problem


def test_cuts_cover_everything_within_the_tile() -> None:
    for rows, columns, elements in [
        (1, 1, 1), (0, 50, 10), (7, 300_000, 1 << 20), (65_536, 151_936, 1 << 26),
        (512, 151_936, 151_936), (4096, 151_936, 4096 * 151_936), (3, 2049, 10**9),
    ]:  # fmt: skip
        slices = cut(rows, columns, columns, elements, block=16)
        for parts, total in ((slices.rows, rows), (slices.columns, columns)):
            assert [part.start for part in parts] == [0, *(p.stop for p in parts[:-1])][
                : len(parts)
            ]
            assert (parts[-1].stop if parts else 0) == total
        # a row is never cut below the narrowest slice
        size = slices.longest_rows * slices.longest_columns
        assert size <= max(elements, min(columns, recompute._MIN_COLUMNS))


def test_no_wide_copy_of_the_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many slices and one range of rows, each is written to the result at once."""
    seen = []
    monkeypatch.setattr(recompute, "_MAX_COLUMNS", 128)
    monkeypatch.setattr(
        recompute, "_store", lambda place, summed, scale: seen.append((place, summed))
    )
    x = make_problem(1, 13, vocab_size=133).to("cpu", torch.bfloat16)
    out = linear_logprobs(x.hidden, x.weight, x.target, backend="chunked")
    torch.autograd.grad(out.logprobs.sum(), (x.hidden, x.weight))
    assert len(seen) == 2 and all(place.data_ptr() == x.data_ptr() for place, x in seen)
