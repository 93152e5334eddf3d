"""What a step saves: rows without a gradient, and a head whose only gradient is an adapter's."""

from benchmarks.savings.measure import measure_savings
from benchmarks.savings.variants import VARIANTS

__all__ = ["VARIANTS", "measure_savings"]
