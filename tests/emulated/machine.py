"""Executes a kernel's programs, one after the other, on one emulated compute unit.

Each instruction is a C function that tinygrad's emulator writes and compiles. A loop in C calls
them, counts what they do and checks, before it happens, each address that they read or write.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.emulated.binary import Binary

POISON = 0x7FC0BEEF  # what registers and shared memory hold at first: as fp32, NaN
_NAN = POISON.to_bytes(4, "little") * (256 * 64)  # vector registers
_MOST = 1 << 31  # instructions of a wave between two barriers
_SCALARS = 102  # registers that a kernel may use
_ENDED, _WAITS, _UNKNOWN, _OUTSIDE, _ENDLESS = range(5)
_NOWHERE, _SCALAR, _GLOBAL, _BUFFER = range(4)  # where an instruction's addresses are
_NONE = 0xFFFF  # no such register

_LOOP = r"""
#include <stdint.h>
#include <xmmintrin.h>

enum { ENDED, WAITS, UNKNOWN, OUTSIDE, ENDLESS };
enum { NOWHERE, SCALAR, GLOBAL, BUFFER };
#define NONE 0xFFFF

typedef struct {
  void (*call)(void *, void *, void *, void *, void *, void *);
  uint64_t count, lanes;  /* executed; lanes that accessed memory */
  int32_t offset;
  uint16_t base, index, more;  /* registers */
  uint8_t kind, width, waits, arguments[6];
} instruction;
typedef struct { uint64_t start, stop; } range;

static uint64_t pair(const uint32_t *words) { return words[0] | (uint64_t)words[1] << 32; }

/* The address that a lane accesses, or 0 where a buffer's bounds mask it. */
static uint64_t address(const instruction *at, const uint32_t *scalar, const uint32_t *vector,
                        int lane) {
  uint64_t base = at->base == NONE ? 0 : pair(scalar + at->base);
  uint32_t index = at->index == NONE ? 0 : vector[at->index * 64 + lane];
  uint32_t more = at->more == NONE ? 0 : scalar[at->more];
  if (at->kind == BUFFER) {
    uint32_t inside = index + at->offset;
    return inside < scalar[at->base + 2] ? (base & 0xFFFFFFFFFFFF) + more + inside : 0;
  }
  if (at->kind == GLOBAL && at->base == NONE)
    base = (uint64_t)vector[(at->index + 1) * 64 + lane] << 32;
  return base + index + more + at->offset;
}

static int held(const range *ranges, uint64_t count, uint64_t from, uint64_t width) {
  for (uint64_t i = 0; i < count; ++i)
    if (from >= ranges[i].start && from + width <= ranges[i].stop) return 1;
  return 0;
}

/* Run a wave until it ends, waits at a barrier, or something is amiss. */
int run(instruction *table, uint64_t first, uint64_t length, void **buffers, uint64_t most,
        int flushes, int counts, const range *ranges, uint64_t num_ranges, uint64_t *outside) {
  const uint32_t *scalar = buffers[0], *vector = buffers[1];
  unsigned before = _mm_getcsr();
  int result = ENDLESS;
  _mm_setcsr(flushes ? before | 0x8040 : before & ~0x8040u);
  while (most--) {
    uint64_t counter = pair(scalar + 256), place = (counter - first) / 4;
    if (counter == UINT64_MAX) { result = ENDED; break; }
    if (place >= length || !table[place].call) { result = UNKNOWN; break; }
    instruction *at = table + place;
    if (at->kind != NOWHERE) {
      uint64_t active = at->kind == SCALAR ? 1 : pair(scalar + 126);
      for (int lane = 0; lane < 64; ++lane) {
        uint64_t from = active >> lane & 1 ? address(at, scalar, vector, lane) : 0;
        if (!from) continue;
        if (!held(ranges, num_ranges, from, at->width)) { *outside = from; goto out; }
        at->lanes += counts;
      }
    }
    at->count += counts;
    void **b = buffers; uint8_t *a = at->arguments;
    at->call(b[a[0]], b[a[1]], b[a[2]], b[a[3]], b[a[4]], b[a[5]]);
    if (at->waits) { result = WAITS; break; }
    continue;
  out:
    result = OUTSIDE;
    break;
  }
  _mm_setcsr(before);
  return result;
}
"""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("count", "lanes")),
        ("offset", ctypes.c_int32),
        *((name, ctypes.c_uint16) for name in ("base", "index", "more")),
        *((name, ctypes.c_uint8) for name in ("kind", "width", "waits")),
        ("arguments", ctypes.c_uint8 * 6),
    )


class Held(NamedTuple):
    """Memory that a kernel may read and write."""

    name: str
    start: int
    stop: int


class Work(NamedTuple):
    """What was executed."""

    instructions: Counter[str]  # of waves, by their names
    read: int  # bytes of global memory
    written: int


@functools.cache
def _loop() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loop.so"
        command = ["clang", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=_LOOP.encode(), check=True)
        run = ctypes.CDLL(str(path)).run
    word, address = ctypes.c_uint64, ctypes.c_void_p
    flag = ctypes.c_int
    run.argtypes = [address, word, word, address, word, flag, flag, address, word, address]
    return run


class Machine:
    """A kernel's waves, with registers and shared memory that hold NaN at first."""

    def __init__(
        self, binary: Binary, warps: int, shared: int, arguments: int, held: Sequence[Held]
    ) -> None:
        from test.mockgpu.amd import emu

        self._emu, self._binary = emu, binary
        code = Held("the code", binary.start, binary.start + binary.size)
        self._held = [code, *held]
        bounds = [bound for part in self._held for bound in part[1:]]
        self._ranges = (ctypes.c_uint64 * len(bounds))(*bounds)
        length = (binary.start + binary.size - binary.entry) // 4
        if not binary.table:
            binary.table.update(entries=(_Instruction * length)(), decoded={}, keep=[])
        self._table, self._decoded = binary.table["entries"], binary.table["decoded"]
        words = max(binary.descriptor.group_segment_fixed_size, shared, 64) // 4
        self._shared = (ctypes.c_uint32 * words)()
        self._poisoned_shared = _NAN[:4] * words
        self._waves = [self._wave(index, warps, arguments) for index in range(warps)]

    def _wave(self, index: int, warps: int, arguments: int) -> tuple[Any, Any, bytes, bytes]:
        """Return a wave's registers, the emulator's arguments, and what registers hold at first."""
        binary, registers = self._binary, self._binary.user_registers(arguments)
        scratch = binary.descriptor.private_segment_fixed_size
        state = self._emu._init_wave(
            binary.entry, 64 * index, 64 * warps, 64 * warps, 1, 1, 0, 0, scratch, "cdna", 0, 0, 0,
            registers, 64,
        )  # fmt: skip
        for register in range(len(registers), _SCALARS):
            state._write_sgpr(register, POISON)
        scalars, vectors, accumulators = (
            buffer._buf.va_addr for buffer in (state.sgpr_buf, state.vgpr_buf, state.accvgpr_buf)
        )
        lanes = ctypes.string_at(vectors, 4 * 64)  # the first register: which thread each is
        own = (ctypes.c_uint8 * (scratch * 64 + 16))()
        buffers = (ctypes.c_void_p * 6)(
            scalars, vectors, 0, ctypes.addressof(self._shared), ctypes.addressof(own), accumulators
        )
        return (state, own), buffers, ctypes.string_at(scalars, 4 * len(state._sgpr_mv)), lanes

    def run(self, grid: tuple[int, int, int], *, backwards: bool = False, counts: bool = True):
        """Execute all programs; ``backwards``: the last first, and of its waves as well."""
        places = list(itertools.product(*(range(size) for size in reversed(grid))))
        for place in reversed(places) if backwards else places:
            self._program(place[::-1], backwards, counts)

    def _program(self, place: tuple[int, ...], backwards: bool, counts: bool) -> None:
        ctypes.memmove(self._shared, self._poisoned_shared, len(self._poisoned_shared))
        for (state, _), buffers, scalars, lanes in self._waves:
            ctypes.memmove(buffers[0], scalars, len(scalars))
            ctypes.memmove(buffers[1], lanes + _NAN[len(lanes) :], len(_NAN))
            ctypes.memmove(buffers[5], _NAN, len(_NAN))
            for register, value in enumerate(self._binary.place(place), self._binary.first_place):
                state._write_sgpr(register, value)
        running = list(range(len(self._waves)))
        running = running[::-1] if backwards else running
        while running:  # each to its next barrier
            running = [wave for wave in running if self._step(wave, counts) == _WAITS]

    def _step(self, wave: int, counts: bool) -> int:
        binary, (state, _), buffers = self._binary, *self._waves[wave][:2]
        outside = ctypes.c_uint64(0)
        while True:
            status = _loop()(
                self._table, binary.entry, len(self._table), buffers, _MOST, binary.flushes, counts,
                self._ranges, len(self._held), ctypes.addressof(outside),
            )  # fmt: skip
            if status == _UNKNOWN:
                self._decode(state.pc)
            elif status == _OUTSIDE:
                raise RuntimeError(f"{self._said(state.pc)} {self._nearest(outside.value)}")
            elif status == _ENDLESS:
                raise RuntimeError(f"{self._said(state.pc)}: a wave does not end")
            else:
                return status

    def _decode(self, counter: int) -> None:
        """Have the emulator compile an instruction that a wave has come to."""
        binary, place = self._binary, (counter - self._binary.entry) // 4
        if not 0 <= place < len(self._table):
            raise RuntimeError(f"{binary.name}: a jump out of the code")
        try:
            (program, runtime), decoded = self._emu._decode_at(counter, "cdna")
        except Exception as error:
            raise RuntimeError(f"{binary.name}: not known to the emulator: {error}") from error
        entry, name = self._table[place], self._emu._op_name(decoded)
        access = _access(decoded, name)
        for field, value in access.items():
            setattr(entry, field, value)
        entry.arguments[:] = (list(program.arg.globals) + [0] * 6)[:6]
        entry.waits = name == "S_BARRIER"
        self._decoded[place] = name
        binary.table["keep"].append(runtime)
        entry.call = runtime.addr

    def _said(self, counter: int) -> str:
        name = self._decoded[(counter - self._binary.entry) // 4].lower()
        return f"{self._binary.name}: {name}"

    def _nearest(self, address: int) -> str:
        part = min(self._held, key=lambda x: max(x.start - address, address - x.stop, 0))
        size = part.stop - part.start
        return f"at byte {address - part.start} of {part.name}, which has {size}"

    def work(self) -> Work:
        """Return what was executed since the last time."""
        found, moved = Counter[str](), Counter[bool]()
        for place, name in self._decoded.items():
            entry = self._table[place]
            found[name] += entry.count
            moved["STORE" in name] += entry.lanes * entry.width
            entry.count = entry.lanes = 0
        return Work(found, moved[False], moved[True])


def _access(decoded: Any, name: str) -> dict[str, int]:
    """Return where an instruction finds the addresses that it accesses, and how many bytes each."""
    encoding = re.sub(r"_.*", "", type(decoded).__name__)
    if name.endswith(("_INV", "_WBL2")) or encoding not in ("SMEM", "GLOBAL", "MUBUF", "FLAT"):
        return {"kind": _NOWHERE}
    words = re.search(r"_DWORD(?:X(\d+))?", name)
    width = 4 * int(words[1] or 1) if words else 1 if "BYTE" in name else 2
    if encoding == "SMEM" and "LOAD" in name:
        more = decoded.soffset.offset if decoded.soffset_en else _NONE
        base = decoded.sbase.offset
        where = dict(
            kind=_SCALAR, base=base, index=_NONE, more=more, offset=_signed(decoded.offset, 21)
        )
    elif encoding == "GLOBAL" and "ATOMIC" not in name:
        base = decoded.saddr.offset
        base = _NONE if base in (124, 127) else base
        index, offset = decoded.addr.offset - 256, _signed(decoded.offset, 13)
        where = dict(kind=_GLOBAL, base=base, index=index, more=_NONE, offset=offset)
    elif encoding == "MUBUF" and "ATOMIC" not in name and not decoded.idxen:
        index = decoded.vaddr.offset - 256 if decoded.offen else _NONE
        more, base = decoded.soffset.offset, decoded.srsrc.offset
        where = dict(kind=_BUFFER, base=base, index=index, more=more, offset=decoded.offset)
    else:
        raise RuntimeError(f"{name}: its addresses are not checked")
    return {**where, "width": width}


def _signed(value: int, bits: int) -> int:
    return (value ^ 1 << bits - 1) - (1 << bits - 1)
