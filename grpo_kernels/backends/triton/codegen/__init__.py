"""A torch function of (T,) vectors as one Triton kernel. Knows neither losses nor log-probs."""

from grpo_kernels.backends.triton.codegen.expressions import UntraceableError
from grpo_kernels.backends.triton.codegen.trace import PointwiseKernel
