"""LoRA steps of a model of a real size by our trainer and by TRL's: the same settings and seed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback
from transformers.models.qwen2 import modeling_qwen2

from benchmarks import text, training
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt, free
from benchmarks.providers.base import Provider
from benchmarks.results import Row
from benchmarks.test_training import PROVIDERS
from benchmarks.training import TrainingConfig

_STEPS = {"cpu": 4, "cuda": 20}
_WARM_UP = 2  # steps whose time does not count
_RANK = 16
# the second step of a pair is off-policy, so that its loss is not 0
_SETTINGS = {"num_iterations": 2, "learning_rate": 1e-4}
_NAMES = ("ours", "trl")
CASES = {
    "tiny": [training.sized("tiny", DEVICE)],
    "gpu": [training.sized("qwen2.5-0.5b-gpu", DEVICE)],
    "gpu-full": [training.sized("qwen2.5-0.5b-gpu", DEVICE)],
}


def names(case: TrainingConfig) -> list[str]:
    return list(_NAMES)


def measure(case: TrainingConfig, names: Sequence[str], session: Session) -> list[Row]:
    rows = []
    for provider in (each for each in PROVIDERS if each.name in names):
        row = Row(provider.name, provider.note)
        row.leave_out("absent", provider.absent(session.device))
        if row.runs:
            with attempt(row):
                _fill(row, _train(provider, case, session.device))
        rows.append(row)
        free(session.device)
    _compare(rows)
    return rows


def about(case: TrainingConfig, device: str) -> str:
    return f"LoRA of rank {_RANK} on all linear layers; {_STEPS[device]} steps, AdamW"


def _train(provider: Provider, config: TrainingConfig, device: str) -> Steps:
    from peft import LoraConfig

    adapter = LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules="all-linear")
    steps = Steps(device)
    with patch.dict(vars(modeling_qwen2)):  # Liger replaces names of the model's module
        torch.manual_seed(training.SEED)  # of the adapter's factors
        trainer = provider.run(config, device, _STEPS[device], peft_config=adapter, **_SETTINGS)
        trainer.add_callback(steps)
        trainer.train()
    return steps


class Steps(TrainerCallback):
    """What a trainer logs of each step, its time, and the peak of the GPU's memory."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.seconds: list[float] = []
        self.logs: list[dict[str, Any]] = []
        self.peak = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(state.global_step)  # both sample alike
        self._start = self._clock()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "grad_norm" in logs:  # not that of the end
            self.seconds.append(self._clock() - self._start)
            self.logs.append(dict(logs))
            if self._cuda:
                self.peak = torch.cuda.max_memory_allocated()

    def _clock(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _fill(row: Row, steps: Steps) -> None:
    row.seconds = steps.seconds[_WARM_UP:]
    names = {"losses": "loss", "rewards": "reward", "gradient_norms": "grad_norm"}
    for name, key in names.items():  # a reward only where a step generated
        row.info[name] = [logs[key] for logs in steps.logs if key in logs]
    row.info["peak_bytes"] = steps.peak
    broken = [name for name in names if not all(map(math.isfinite, row.info[name]))]
    row.leave_out("wrong", f"{', '.join(broken)} not finite" if broken else None)
    halves = steps.seconds[0::2], steps.seconds[1::2]
    generating, only_training = (median(each[1:] or each) for each in halves)
    row.cells = {
        "step that generates": text.duration(generating),
        "step that does not": text.duration(only_training),
        "peak MiB": text.mib(steps.peak) if steps.peak else "",
        "loss": ", ".join(f"{x:.2g}" for x in row.info["losses"][:4]),
        "reward": ", ".join(f"{x:.3g}" for x in row.info["rewards"][:4]),
    }


def _compare(rows: Sequence[Row]) -> None:
    """Say by how much the loss of the first off-policy step differs, where both had its rows."""
    both = [row for row in rows if row.runs]
    if len(both) == len(_NAMES) and len({row.info["rewards"][0] for row in both}) == 1:
        ours, other = (row.info["losses"][1] for row in both)
        both[0].errors["loss of step 2"] = abs(ours - other)


def test_lora(row: Row) -> None:
    """Time LoRA steps."""
    assert row.seconds
