"""The native CPU kernels: the ctypes side of ``csrc``, which is optional."""

from grpo_kernels.backends.cpu.library import isas, unavailable
from grpo_kernels.backends.cpu.native import Native
