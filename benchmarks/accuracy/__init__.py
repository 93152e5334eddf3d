"""Errors of every provider's log-probabilities on a policy's distributions, token by token."""

from benchmarks.accuracy.measure import measure_accuracy, measure_one
from benchmarks.accuracy.providers import PROVIDERS

__all__ = ["PROVIDERS", "measure_accuracy", "measure_one"]
