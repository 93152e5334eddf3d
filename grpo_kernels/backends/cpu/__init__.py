"""The native CPU kernels: the ctypes side of ``csrc``, which is optional."""

from grpo_kernels.backends.cpu.entries import NATIVE_ENTRIES
from grpo_kernels.backends.cpu.linear import NATIVE_HEAD_ROWS, NATIVE_LINEAR
from grpo_kernels.backends.cpu.rows import announce_absence, isa, isas, unavailable

__all__ = [
    "NATIVE_ENTRIES",
    "NATIVE_HEAD_ROWS",
    "NATIVE_LINEAR",
    "announce_absence",
    "isa",
    "isas",
    "unavailable",
]
