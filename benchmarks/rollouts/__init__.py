"""Where the time of a training step goes, by the engine that generates."""

from benchmarks.rollouts.engines import ENGINES
from benchmarks.rollouts.measure import measure_rollouts
from benchmarks.rollouts.sizes import pairs

__all__ = ["ENGINES", "measure_rollouts", "pairs"]
