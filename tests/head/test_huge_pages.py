"""Huge pages are advice: the tensor is the same, whatever its size and wherever it lies."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.head import matmul


@pytest.mark.parametrize("elements", [0, 1, matmul.MIN_BYTES, matmul.MIN_BYTES + 12345])
@pytest.mark.parametrize("offset", [0, 1])
def test_tensor_stays_what_it_is(elements, offset):
    values = torch.empty(elements + offset, dtype=torch.uint8)[offset:]
    assert matmul.on_huge_pages(values) is values
    values.fill_(7)
    assert (values == 7).all()


def test_platform_without_huge_pages(monkeypatch):
    monkeypatch.delattr(matmul.mmap, "MADV_HUGEPAGE", raising=False)
    matmul._madvise.cache_clear()
    values = torch.empty(matmul.MIN_BYTES, dtype=torch.uint8)
    assert matmul.on_huge_pages(values) is values
    matmul._madvise.cache_clear()
