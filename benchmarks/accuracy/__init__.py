"""Errors of every provider on a policy's distributions, of values and of gradients, by token."""

from benchmarks.accuracy.measure import measure_accuracy, measure_one
from benchmarks.accuracy.providers import PROVIDERS

__all__ = ["PROVIDERS", "measure_accuracy", "measure_one"]
