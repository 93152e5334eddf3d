"""Calls in processes of their own.

For the resident memory of a CPU process, for several ranks, for who may hang and must be killed,
and for who changes the process that it is in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.support.launch import RanksFailedError, ranks

_LONGEST = 1800.0  # seconds of a process that is not expected to hang


class ChildError(RuntimeError):
    """What a process that failed said last, or that it hung."""


def ask(
    call: Callable[..., Any],
    *arguments: Any,
    processes: int = 1,
    timeout: float = _LONGEST,
    **environment: str,
) -> Any:
    """Return what a module's function returns for ``arguments`` in a fresh process.

    Several ``processes`` are ranks of a group, with a thread each; the first one's answer counts.

    Raises:
        ChildError: the process failed, or it took longer than ``timeout`` and was ended.
    """
    threads = torch.get_num_threads() if processes == 1 else 1
    environment["OMP_NUM_THREADS"] = str(threads)
    try:
        with ranks(processes, **environment) as group:
            return group.run(_with_threads, threads, call, arguments, limit=timeout)[0]
    except RanksFailedError as error:
        print(error, file=sys.stderr)
        first = re.split(r"\nrank \d+", str(error))[0]
        last = first.strip().splitlines()[-1].removeprefix("rank 0: ")
        raise ChildError(last[:200]) from None


def _with_threads(threads: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    return call(*arguments)
