"""Compiles a torch function of (T,) vectors to one Triton kernel. Independent of losses."""

from grpo_kernels.backends.triton.codegen.expressions import UntraceableError
from grpo_kernels.backends.triton.codegen.trace import PointwiseKernel
