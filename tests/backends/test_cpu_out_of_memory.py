"""A native kernel that finds no memory says so in Python, whichever of its threads it was."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from grpo_kernels import available_backends
from grpo_kernels.head import Head, Transform

CSRC = Path(__file__).parents[2] / "csrc"


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Limit the process to ``more`` further bytes of addresses."""
    import resource

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * mmap.PAGESIZE
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits")
@pytest.mark.skipif("cpu" not in available_backends(), reason="no native kernels")
def test_out_of_memory_is_torchs_error():
    from grpo_kernels.backends.cpu.linear import NATIVE_LINEAR

    columns = 1 << 28  # rows of one storage: their sums alone would take 600 MB
    head = Head(torch.zeros(1, 8).expand(columns, 8), None, Transform())
    hidden, target = torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)
    message = f"grpo_linear: can't allocate memory to work on 64 rows of {columns} logits"
    with at_most(64 << 20), pytest.raises(torch.OutOfMemoryError, match=message):
        NATIVE_LINEAR(hidden, head, target, "fp32", False)
    few = Head(torch.zeros(9, 8), None, Transform())
    assert NATIVE_LINEAR(hidden, few, target, "fp32", False).logp.isfinite().all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits")
@pytest.mark.skipif("cpu" not in available_backends(), reason="no native kernels")
def test_so_is_that_of_products_with_entries():
    from grpo_kernels.backends.cpu import NATIVE_ENTRIES
    from grpo_kernels.backends.entries import Entries

    entries = Entries(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3),
                      torch.ones(2, dtype=torch.int32), *torch.zeros(3, 2))  # fmt: skip
    out = torch.empty(1 << 28, 0)  # where its rows' entries begin would take 2 GB
    message = "grpo_transposed_matmul: can't allocate memory to work on 2 rows of 3 entries"
    with at_most(64 << 20), pytest.raises(torch.OutOfMemoryError, match=message):
        NATIVE_ENTRIES.transposed_matmul(entries, torch.ones(2), torch.empty(2, 0), out, False)


_STARVED = """
#include "threads.h"

int main() {
  std::atomic<int> done{0};
  try {
    grpo::share(8, 4, [&](const auto& next) {
      for (int64_t item; (item = next()) < 8; ++done) {
        if (item == 3) throw std::bad_alloc();
      }
    });
  } catch (const std::bad_alloc&) {
    return done == 7 ? 0 : 1;
  }
  return 2;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None or not CSRC.exists(), reason="no compiler")
def test_a_starved_thread_is_noticed_once_all_have_ended(tmp_path):
    source, program = tmp_path / "starved.cpp", tmp_path / "starved"
    source.write_text(_STARVED)
    subprocess.run(
        ["g++", "-std=c++17", "-pthread", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    assert subprocess.run([str(program)], check=False).returncode == 0
