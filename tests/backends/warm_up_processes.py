"""One of two processes that warm up together: ``python -m tests.backends.warm_up_processes``

FOLDER RANK FATE prints a JSON object, see :class:`Outcome`, in a process without
``TRITON_INTERPRET``. FATE is that of the first process.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from typing import Any

import torch.distributed as dist
from triton.runtime.jit import JITFunction

from grpo_kernels import LossConfig, warm_up
from tests.backends import fake_driver
from tests.backends.warm_up_steps import CASES, inputs_of, posed
from tests.net.product import head_of

_TIMEOUT = datetime.timedelta(seconds=60)  # nobody waits longer for the other


@dataclasses.dataclass
class Outcome:
    """What the compiler was run for, what was found on disk, and how it ended."""

    compiled: list[str]
    found: list[str]
    error: str | None


def main(folder: str, rank: int, fate: str) -> Outcome:
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    store.set(f"start{rank}", "")
    store.wait(["start0", "start1"])
    asked = fake_driver.install_compiler()
    if not rank:
        _meet(fate)
    problem, error = posed(CASES["plain"], 4), None
    try:
        warm_up(
            head_of(CASES["plain"], problem),
            LossConfig(),
            inputs=inputs_of(problem),
            group=dist.group.WORLD,
            backend="triton",
            gradients=False,  # two kernels
        )
    except Exception as caught:
        error = str(caught)
    # who fails lives on, so that the other hears nothing of it
    store.set(f"end{rank}", "")
    if fate != "is killed":
        store.wait(["end0", "end1"])
    return Outcome(asked.compiled, asked.found, error)


def _meet(fate: str) -> None:
    """Let this process meet its fate."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    if fate == "is killed":
        JITFunction._do_compile = lambda *_, **__: os._exit(9)
    elif fate == "cannot compile":
        JITFunction._do_compile = broken


if __name__ == "__main__":
    folder, rank, fate = sys.argv[1:]
    os.environ["LOCAL_RANK"] = rank
    print(json.dumps(dataclasses.asdict(main(folder, int(rank), fate))))
