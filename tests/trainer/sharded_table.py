"""Print what a run logs on one process and sharded over two, side by side, as a markdown table.

``python -m tests.trainer.sharded_table``; ZeRO-3 needs DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import tempfile

from tests.support import launch
from tests.trainer.processes import features

SHOWN = ("loss", "grad_norm", "kl", "entropy", "reward")
TITLES = {"one": "one process", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}


def main() -> None:
    kinds = ["fsdp2"] + ["zero3"] * (importlib.util.find_spec("deepspeed") is not None)
    with tempfile.TemporaryDirectory() as folder:
        logs = {"one": features.run("reference", "one", f"{folder}/one")["log"]}
        for kind in kinds:
            found = launch.run(features.run, "reference", kind, f"{folder}/{kind}")
            logs[kind] = found[0]["log"]
    print("| step | metric |", " | ".join(TITLES[kind] for kind in logs), "|")
    print("|---|---|" + "---|" * len(logs))
    for step in range(features.STEPS):
        for name in SHOWN:
            values = [f"{log[step][name]:.7g}" for log in logs.values()]
            print(f"| {step + 1} | `{name}` |", " | ".join(values), "|")


if __name__ == "__main__":
    main()
