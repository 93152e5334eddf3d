"""16-bit GEMMs on a CPU read past the ends of rows: nothing that lies there may show."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.backends.base import output_view
from grpo_kernels.head import clear_row_ends
from grpo_kernels.head.matmul import with_clear_row_ends

BACKENDS = [name for name in available_backends() if name != "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outputs", (("logprobs",), ("logprobs", "rank")))
@pytest.mark.parametrize("precision", ("fp32", "input"))
def test_nan_stays_in_its_row(backend: str, outputs: tuple[str, ...], precision: str) -> None:
    """Of such sizes torch's 16-bit GEMM reads from the next row."""
    hidden, weight = torch.randn(33, 33).bfloat16(), torch.randn(257, 33).bfloat16()
    hidden[16] = float("nan")
    out = linear_logprobs(
        hidden, weight, torch.arange(33), outputs=outputs, precision=precision, backend=backend
    )
    assert out.logprobs.isnan().nonzero().flatten().tolist() == [16]


@pytest.mark.parametrize("columns", [1, 5, 31, 33, 257, 1000, 1024])
def test_products_see_nothing_behind_narrowed_rows(columns: int) -> None:
    tile = torch.full((32, columns), float("nan"))
    narrowed = output_view(tile, torch.bfloat16)
    narrowed.normal_()
    before = narrowed.clone()
    clear_row_ends(narrowed)
    assert torch.equal(narrowed, before)
    weight = torch.randn(columns, 32).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernel that reads past the end
    try:
        product = torch.mm(narrowed, weight)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(product, torch.mm(before, weight))


def test_only_rows_that_a_product_reads_beyond_are_copied() -> None:
    for columns, dtype in ((32, torch.bfloat16), (64, torch.float16), (33, torch.float32)):
        x = torch.zeros(3, columns, dtype=dtype)
        assert with_clear_row_ends(x) is x
    x = torch.randn(3, 33).bfloat16()
    copy = with_clear_row_ends(x)
    assert torch.equal(copy, x) and copy.stride() == (64, 1)
    assert not copy.as_strided((3, 31), (64, 1), 33).any()
