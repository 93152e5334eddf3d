"""Adapters that run grpo_kernels inside other trainers, one module per trainer."""
