"""One engine on one model: ``python -m benchmarks.rollouts.measure ENGINE SIZE DEVICE STEPS``.

In a process of its own, since an engine changes threads and random numbers of the process it is in.
The numbers are those that the trainer logs of itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.child import ask
from benchmarks.results import RolloutsEntry
from benchmarks.rollouts.engines import ENGINES, Engine
from benchmarks.rollouts.server import served
from benchmarks.training.providers import Job, build
from benchmarks.training.task import FULL, FULL_GPU, QUICK, TrainingConfig

_MIDDLE = replace(
    FULL, layers=4, hidden=512, intermediate=2048, heads=8, vocabulary=32000, completion_tokens=32
)
# what an update of the weights costs depends on the size; smallest first
SIZES = {
    "cpu": {"small": QUICK, "middle": _MIDDLE, "large": replace(FULL, completion_tokens=32)},
    "cuda": {
        "middle": replace(FULL_GPU, layers=12),
        # the width of Qwen2.5-1.5B
        "large": replace(FULL_GPU, layers=14, hidden=1536, intermediate=8960, heads=12),
    },
}
_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
_PROFILE = "profiling/"
_WARM_UP = 2  # steps: in the first one weights are sent that are no update


def pairs(device: str, full: bool) -> list[tuple[Engine, str]]:
    """Return the pairs to measure: every engine on the largest model, and on the others the engines
    that are sent weights. Not ``full``: every engine on the smallest."""
    first, *_, last = names = list(SIZES[device])
    if not full:
        return [(engine, first) for engine in ENGINES]
    return [(engine, name) for name in names for engine in ENGINES if engine.sent or name == last]


def measure_rollouts(engine: Engine, size: str, device: str, steps: int) -> RolloutsEntry:
    """Measure ``steps`` steps of a model of this size, on "cpu" or "cuda"."""
    config, words = SIZES[device][size], [engine.name, size, device, str(steps)]
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
        **ask("benchmarks.rollouts.measure", words, _LONGEST, **environment),
    )


def run(engine: Engine, config: TrainingConfig, device: str, steps: int) -> dict[str, Any]:
    """Return the seconds of ``steps`` steps by phase, the tokens, and the bytes of an update."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(config=config, device=device, steps=_WARM_UP + steps, folder=Path(folder))
        settings = engine.settings(config, device)
        if not engine.server:
            return _train(job, steps, settings)
        with served(config, device, job.folder) as port:
            return _train(job, steps, settings | {"vllm_server_port": port})


def _train(job: Job, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    from grpo_trainer.rollout import policy_weights

    # completions end where they like
    trainer = build("grpo_trainer", job, generation_kwargs=None, write_report=False, **settings)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row][-steps:]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(_PROFILE))
    weights = list(policy_weights(trainer.model))
    trainer.rollouts.close()
    return {
        "parameters": sum(x.numel() for x in trainer.model.parameters()),
        "weight_bytes": sum(x.numel() * x.element_size() for _, x in weights),
        "tokens": [job.config.sequences * row["completions/mean_length"] for row in rows],
        "seconds": [row["step_time"] for row in rows],
        "phases": {
            name.removeprefix(_PROFILE): [row.get(name, 0.0) for row in rows] for name in names
        },
    }


def _main(name: str, size: str, device: str, steps: str) -> None:
    [engine] = [engine for engine in ENGINES if engine.name == name]
    print(json.dumps(run(engine, SIZES[device][size], device, int(steps))), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
