"""An entry of the result file for one engine on one model."""

from __future__ import annotations

from benchmarks.child import ask
from benchmarks.results import RolloutsEntry
from benchmarks.rollouts.engines import Engine
from benchmarks.rollouts.sizes import sizes

_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}


def measure_rollouts(engine: Engine, size: str, device: str, steps: int) -> RolloutsEntry:
    """Measure ``steps`` steps of a model of this size, on "cpu" or "cuda"."""
    config, words = sizes(device)[size], [engine.name, size, device, str(steps)]
    environment = dict(_ENVIRONMENT)
    if device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return RolloutsEntry(
        engine=engine.name,
        note=engine.note,
        sent=engine.sent,
        model=str(config),
        dtype="fp32" if device == "cpu" else "bf16",
        sequences=config.sequences,
        prompt_tokens=config.prompt_tokens,
        completion_tokens=config.completion_tokens,
        **ask("benchmarks.rollouts.run", words, _LONGEST, **environment),
    )
