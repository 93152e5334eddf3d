"""A torch function of (T,) vectors as one Triton kernel. Knows neither losses nor log-probs."""

from grpo_kernels.pointwise.kernel import PointwiseKernel
from grpo_kernels.pointwise.ops import UntraceableError

__all__ = ["PointwiseKernel", "UntraceableError"]
