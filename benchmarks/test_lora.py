"""LoRA steps of a real-size model in our trainer and in TRL, with the same settings and seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from benchmarks import text, training
from benchmarks.conftest import DEVICE, Session, check_row
from benchmarks.measure import attempt, free
from benchmarks.results import Row
from benchmarks.training import TRAINERS, TrainingConfig, Watch

_STEPS = {"cpu": 4, "cuda": 20}
_WARM_UP = 2  # steps without a time
_RANK = 16
# the second step of a pair is off-policy, so its loss isn't 0
_SETTINGS = {"num_iterations": 2, "learning_rate": 1e-4}
NOTES = {name: TRAINERS[name].note for name in ("ours", "trl")}
CASES = {
    "tiny": [training.sized("tiny", DEVICE)],
    "gpu": [training.sized("qwen2.5-0.5b-gpu", DEVICE)],
    "gpu-full": [training.sized("qwen2.5-0.5b-gpu", DEVICE)],
}


def about(case: TrainingConfig, device: str) -> str:
    return f"LoRA of rank {_RANK} on all linear layers; {_STEPS[device]} steps, AdamW"


def measure(case: TrainingConfig, rows: Sequence[Row], session: Session) -> None:
    device = session.device
    for row in rows:
        row.leave_out("absent", TRAINERS[row.provider].absent(device))
        if row.runs:
            with attempt(row):
                from peft import LoraConfig

                adapter = LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules="all-linear")
                changes = _SETTINGS | {"peft_config": adapter}
                steps = _STEPS[device]
                _fill(row, training.train(TRAINERS[row.provider], case, device, steps, **changes))
        free(device)
    _compare(rows)


def _fill(row: Row, steps: Watch) -> None:
    row.seconds = steps.seconds[_WARM_UP:]
    names = {"losses": "loss", "rewards": "reward", "gradient_norms": "grad_norm"}
    for name, key in names.items():  # only a step that generated has a reward
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
    """Record the difference of the first off-policy loss, if both trainers had its rows."""
    both = [row for row in rows if row.runs]
    if len(both) == len(NOTES) and len({row.info["rewards"][0] for row in both}) == 1:
        ours, other = (row.info["losses"][1] for row in both)
        both[0].errors["loss of step 2"] = abs(ours - other)


test_lora = check_row
