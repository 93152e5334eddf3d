"""What only native kernels have: the ends of their memory, threads, and too little of either."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from grpo_kernels.backends import BACKENDS, StatsGrad, Tile, native_library
from grpo_kernels.backends.cpu import Native
from grpo_kernels.head import Head, HeadLoRA, Transform
from tests.backends.conftest import ISAS
from tests.net.test_net import assert_none_fails

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages and limits of Linux"),
    pytest.mark.skipif(not ISAS, reason="no native kernels"),
]
CSRC = Path(__file__).parents[2] / "csrc"

_GUARDED = """
import ctypes, itertools, mmap, sys, torch
from grpo_kernels.backends.cpu import Native
from grpo_kernels.head import Head, HeadLoRA, Transform

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_the_end(x):  # of a mapping, before a page that cannot be read
    pages = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert libc.mprotect(whole.data_ptr() + pages, mmap.PAGESIZE, 0) == 0
    return whole[pages - x.nbytes : pages].view(x.dtype).view(x.shape).copy_(x)

dtypes = (torch.float32, torch.bfloat16, torch.float16)
for rank, dtype in itertools.product(range(int(sys.argv[1])), dtypes):
    linear = Native(rank).linear_stats
    for tokens, depth, columns in ((1, 1, 1), (3, 33, 17), (17, 100, 1025), (50, 257, 130)):
        hidden, weight = (at_the_end(torch.randn(n, depth).to(dtype)) for n in (tokens, columns))
        target = at_the_end(torch.randint(columns, (tokens,)))
        bias = at_the_end(torch.randn(columns).to(dtype))
        logits = at_the_end(torch.empty(tokens, columns))
        linear(hidden, Head(weight, bias, Transform()), target, "fp32", True, logits)
        lora = HeadLoRA(a=torch.randn(8, depth), b=at_the_end(torch.randn(columns, 8)))
        linear(hidden, Head(weight, bias, Transform(), lora), target, "fp32", True, logits)
print("done")
"""
# there is no room for the stacks of all 64 threads
_CRAMPED = """
import mmap, resource, torch
from grpo_kernels.backends.cpu import Native
from grpo_kernels.head import Head, Transform

hidden, head = torch.randn(64, 64), Head(torch.randn(5000, 64), None, Transform())
target = torch.arange(64)
expected = Native().linear_stats(hidden, head, target, "fp32", False)
torch.set_num_threads(64)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20),) * 2)
found = Native().linear_stats(hidden, head, target, "fp32", False)
assert torch.equal(found.logprobs, expected.logprobs)
print("done")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_GUARDED, id="touches nothing beyond its arguments"),
        pytest.param(_CRAMPED, id="works where no thread can be started"),
    ],
)
def test_in_a_process(program: str) -> None:
    words = [sys.executable, "-c", program, str(len(ISAS))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(len(ISAS)), ids=ISAS)
def test_generated_cases_of_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Those of other tests run what is best here."""
    monkeypatch.setitem(BACKENDS, "cpu", Native(rank))
    assert_none_fails(103, 60, ("cpu",))


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


def test_out_of_memory_is_torchs_error() -> None:
    columns = 1 << 28  # rows of one storage: their sums alone would take 600 MB
    head = Head(torch.zeros(1, 8).expand(columns, 8), None, Transform())
    hidden, target = torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)
    message = f"grpo_linear: can't allocate memory to work on 64 rows of {columns} logits"
    with at_most(64 << 20), pytest.raises(torch.OutOfMemoryError, match=message):
        BACKENDS["cpu"].linear_stats(hidden, head, target, "fp32", False)
    few = Head(torch.zeros(9, 8), None, Transform())
    assert (
        BACKENDS["cpu"].linear_stats(hidden, few, target, "fp32", False).logprobs.isfinite().all()
    )


_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "double": ctypes.c_double}


@pytest.mark.skipif(not CSRC.exists(), reason="no sources")
@pytest.mark.parametrize("name", native_library.STRUCTS)
def test_a_mirror_has_the_fields_of_the_header(name: str) -> None:
    """Sizes do not show fields in another order, or in the padding at the end."""
    headers = "".join(path.read_text() for path in CSRC.glob("*.h"))
    (body,) = re.findall(rf"^struct {name} {{$(.*?)^}};$", headers, re.M | re.S)
    fields = []
    for kind, pointer, names in re.findall(r"^  (?:const )?(\w+)(\*?) (\w[\w, ]*);", body, re.M):
        view = ctypes.c_void_p if pointer else (_TYPES | native_library.VIEWS)[kind]
        fields += [(field, view) for field in names.split(", ")]
    assert native_library.VIEWS[name]._fields_ == fields


def test_a_struct_of_another_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    view = native_library.VIEWS["Tile"]
    shorter = type("Tile", (ctypes.Structure,), {"_fields_": view._fields_[:-1]})
    sizes = f"struct Tile of {ctypes.sizeof(shorter)} bytes, got {ctypes.sizeof(view)}"
    monkeypatch.setitem(native_library.VIEWS, "Tile", shorter)
    with pytest.raises(ImportError, match=sizes):
        native_library.load_library.__wrapped__()


def test_a_library_of_an_older_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # the C library has no function grpo_struct_size either
    monkeypatch.setattr(native_library, "LIBRARY", Path(ctypes.util.find_library("c") or ""))
    monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises(ImportError, match=r"older version.* build the native CPU extension again"):
        native_library.load_library.__wrapped__()


def test_arguments_beyond_their_memory_are_errors() -> None:
    backend = Native()
    rows, logits = torch.zeros(4), torch.zeros(4, 9)
    tile = Tile(logits, torch.zeros(4, dtype=torch.int64), Transform())
    stats = backend.stats(tile, False)
    gradient = StatsGrad(rows)
    entries = backend.extract_entries(tile, stats, 0, 0, rows + 1e-3, 9)
    hidden, target, fp32 = torch.zeros(4, 8), tile.target, "fp32"
    fitting = Head(torch.zeros(9, 8), None, Transform())
    short = Head(torch.zeros(9, 7), None, Transform())
    biased = Head(torch.zeros(9, 8), torch.zeros(8), Transform())
    lora = HeadLoRA(a=torch.zeros(2, 8), b=torch.zeros(8, 2))
    adapted = Head(torch.zeros(9, 8), None, Transform(), lora)
    calls: list[Callable[[], object]] = [
        lambda: backend.stats(tile._replace(target=target[:3]), False),
        lambda: backend.stats(tile._replace(logits=logits.double()), False),
        lambda: backend.stats(tile._replace(logits=torch.zeros(9, 4).t()), False),
        lambda: backend.dlogits_(tile, stats, gradient, torch.zeros(4, 8)),
        lambda: backend.dlogits_(tile, stats, StatsGrad(rows[:3]), logits),
        lambda: backend.dlogits_(tile, stats, gradient, torch.zeros(4, 9, device="meta")),
        lambda: backend.extract_entries(tile, stats, 0, 0, rows, 9, None, gradient),
        lambda: backend.linear_stats(hidden, short, target, fp32, False),
        lambda: backend.linear_stats(hidden, biased, target, fp32, False),
        lambda: backend.linear_stats(hidden, adapted, target, fp32, False),
        lambda: backend.linear_stats(hidden[:3], fitting, target, fp32, False),
        lambda: backend.entries_matmul(entries, rows, torch.zeros(9, 5), torch.zeros(3, 5)),
        lambda: backend.entries_matmul(entries, rows, torch.zeros(9, 5), torch.zeros(4, 4)),
        lambda: backend.entries_transposed_matmul(
            entries, rows, torch.zeros(3, 5), torch.zeros(9, 5), False, 0
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="native kernels: unexpected"):
            call()


_STARVED = """
#include "threads.h"

int main() {
  std::atomic<int> done{0};
  try {
    grpo::Team::run(4, [&](grpo::Team& team) {
      for (int64_t item; (item = team.next(8)) < 8; ++done) {
        if (item == 3) throw std::bad_alloc();
      }
      team.meet();
      done = 8;
    });
  } catch (const std::bad_alloc&) {
    return done == 7 ? 0 : 1;
  }
  return 2;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None or not CSRC.exists(), reason="no compiler")
def test_a_starved_thread_is_noticed_once_all_have_ended(tmp_path: Path) -> None:
    source, program = tmp_path / "starved.cpp", tmp_path / "starved"
    source.write_text(_STARVED)
    subprocess.run(
        ["g++", "-std=c++17", "-pthread", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    assert subprocess.run([str(program)], check=False).returncode == 0


def test_a_call_starts_its_threads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks of tokens it has."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    head = Head(torch.randn(5000, 8), None, Transform())
    target = torch.zeros(2000, dtype=torch.int64)
    started = native_library.load_library().grpo_threads_started
    before = started()
    BACKENDS["cpu"].linear_stats(torch.randn(2000, 8), head, target, "fp32", False)
    assert started() - before == 2
