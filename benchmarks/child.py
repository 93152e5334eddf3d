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

from tests.support.launch import Ranks, RanksFailedError, ranks

# of a process with vLLM
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
_LONGEST = 1800.0  # seconds of a process that is not expected to hang
_shared: dict[int, Ranks] | None = None  # by their number, once calls share processes


class ChildError(RuntimeError):
    """What a process that failed said last, or that it hung."""


def share_processes() -> None:
    """Let calls without variables of their own share processes from now on.

    To start one takes longer than a tiny case; its memory is not that of a fresh one.
    """
    global _shared
    _shared = {}


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
    request = _with_threads, threads, call, arguments
    try:
        if _shared is not None and not environment:
            group = _shared.pop(processes, None) or Ranks(processes)
            answers = group.run(*request, limit=timeout)
            _shared[processes] = group  # one that has failed has ended
            return answers[0]
        with ranks(processes, OMP_NUM_THREADS=str(threads), **environment) as group:
            return group.run(*request, limit=timeout)[0]
    except RanksFailedError as error:
        raise _child_error(error) from None


def _child_error(error: RanksFailedError) -> ChildError:
    print(error, file=sys.stderr)
    first = re.split(r"\nrank \d+", str(error))[0]
    return ChildError(first.strip().splitlines()[-1].removeprefix("rank 0: ")[:200])


def _with_threads(threads: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    return call(*arguments)
