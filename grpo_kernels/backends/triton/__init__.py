"""Triton kernels and their launchers. Importing this package imports Triton."""

from grpo_kernels.backends.triton.anchored import linear_logp_gradient
from grpo_kernels.backends.triton.cuts import common_cuts, tail_sums
from grpo_kernels.backends.triton.divergence import divergence_gradient_, divergence_sums
from grpo_kernels.backends.triton.dlogits import dlogits_
from grpo_kernels.backends.triton.extract import extract_entries
from grpo_kernels.backends.triton.linear_stats import linear_stats
from grpo_kernels.backends.triton.packing import KernelPacking
from grpo_kernels.backends.triton.row_stats import logp_gradient_, row_stats, weighted_gradient
from grpo_kernels.backends.triton.scaling import scaled
from grpo_kernels.backends.triton.sums import (
    entries_matmul,
    entries_transposed_matmul,
    segment_sum,
)
