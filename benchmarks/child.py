"""Calls in separate processes.

For the resident memory of a CPU process, for several ranks, for calls that may hang and must be
killed, and for calls that change their process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """A process failed, with its last output, or it hung."""


def share_processes() -> None:
    """Let calls without environment variables share processes from now on.

    Starting a process takes longer than a tiny case. A shared process has memory of earlier calls.
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
        ChildError: the process failed, or ran longer than ``timeout`` and was killed.
    """
    threads = torch.get_num_threads() if processes == 1 else 1

    def run(group: Ranks) -> Any:
        return group.run(_with_threads, threads, call, arguments, limit=timeout)[0]

    try:
        if _shared is not None and not environment:
            group = _shared.pop(processes, None) or Ranks(processes)
            answer = run(group)
            _shared[processes] = group  # one that has failed has ended
            return answer
        with ranks(processes, OMP_NUM_THREADS=str(threads), **environment) as group:
            return run(group)
    except RanksFailedError as error:
        raise _child_error(error) from None


def ask_each(
    call: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    workers: int,
    timeout: float = _LONGEST,
) -> list[Any]:
    """Return the answers for several arguments, or a :class:`ChildError` after a failure.

    ``workers`` processes share the arguments. A process that fails, or runs longer than
    ``timeout``, is replaced.
    """
    answers: list[Any] = [None] * len(arguments)

    def serve(first: int) -> None:
        group: Ranks | None = None
        try:
            for index in range(first, len(arguments), workers):
                group = group or Ranks(1)
                try:
                    answers[index] = group.run(call, *arguments[index], limit=timeout)[0]
                except RanksFailedError as error:
                    answers[index], group = _child_error(error), None
        finally:
            if group is not None:
                group.close()

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(serve, range(workers)):
            pass
    return answers


def _child_error(error: RanksFailedError) -> ChildError:
    print(error, file=sys.stderr)
    first = re.split(r"\nrank \d+", str(error))[0]
    return ChildError(first.strip().splitlines()[-1].removeprefix("rank 0: ")[:200])


def _with_threads(threads: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    return call(*arguments)
