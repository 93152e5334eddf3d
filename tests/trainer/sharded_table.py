"""Print what a run logs on one process and sharded over two, side by side, as a markdown table.

``python -m tests.trainer.sharded_table``; ZeRO-3 needs DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch

from tests.trainer import test_sharded

CASE = "reference"
SHOWN = ("loss", "grad_norm", "kl", "entropy", "reward")
TITLES = {"one": "one process", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}


def main() -> None:
    kinds = ["fsdp2"] + ["zero3"] * (importlib.util.find_spec("deepspeed") is not None)
    with tempfile.TemporaryDirectory() as folder:
        logs = {"one": test_sharded.sharded_runs.main(folder, "one", [CASE])[CASE]["log"]}
        for kind in kinds:
            done = test_sharded.launch(Path(folder), f"{kind}:{CASE}")
            assert done.returncode == 0, done.stderr
            logs[kind] = torch.load(f"{folder}/{kind}.pt")[CASE]["log"]
    print("| step | metric |", " | ".join(TITLES[kind] for kind in logs), "|")
    print("|---|---|" + "---|" * len(logs))
    for step in range(test_sharded.STEPS):
        for name in SHOWN:
            values = [f"{log[step][name]:.7g}" for log in logs.values()]
            print(f"| {step + 1} | `{name}` |", " | ".join(values), "|")


if __name__ == "__main__":
    main()
