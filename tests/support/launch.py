"""Starts processes: a group over gloo that is handed functions, or a module under a launcher.

A process takes longer to start than most cases to run. So one group serves all tests of a session
that ask for as many processes: :func:`run` starts it where there is none.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # of one call
TAIL = 6000  # characters of what a process that failed has printed
_GROUP_TIMEOUT = timedelta(seconds=300)  # of a collective


class RanksFailedError(AssertionError):
    """What went wrong on which rank, that which failed first before the others."""


@contextmanager
def unread() -> Iterator[TextIO]:
    """Yield an output whose reader has gone, as after ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        yield output


class Ranks:
    """Processes of one group over gloo, which run functions together, one after the other.

    Each sees the variables of ``torchrun``, so that frameworks find the group as they do there. A
    single process has neither.

    Args:
        size: number of processes.
        nodes: machines that they seem to be on, with as many processes each.
        grace: seconds that others may go on for, after one has failed.
        variables: others of their environment.
    """

    def __init__(self, size: int, nodes: int = 1, grace: float = 20.0, **variables: str) -> None:
        self.size = size
        self._grace = grace
        # the system chooses the port; the processes find each other here, as under torchrun
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            node, local = divmod(rank, size // nodes)
            own = {
                "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "GROUP_RANK": node,
                "LOCAL_WORLD_SIZE": size // nodes, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
                "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            shared = {name: str(value) for name, value in own.items()} if size > 1 else {}
            self._start(rank, **shared | variables)

    def _start(self, rank: int, **variables: str) -> None:
        mine, its = Pipe()
        with its, self._output(rank).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.launch", str(its.fileno())],
                cwd=ROOT, env=environment(**variables), pass_fds=[its.fileno()],
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        self._connections.append(mine)

    def run(
        self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT_S
    ) -> list[Any]:
        """Call an importable function on every rank; return what it returns, in order of ranks.

        Raises:
            RanksFailedError: a rank raised something, died, or did not end in ``limit`` seconds.
                The processes have ended.
        """
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, arguments)))
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for rank, well, answer in self._answers(limit):
            (answers if well else failed)[rank] = answer
        if failed:
            first = next(iter(failed))
            printed = self._output(first).read_text(errors="replace")[-TAIL:]
            self.close()
            said = "\n".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
            raise RanksFailedError(f"{said}\nrank {first} has printed:\n{printed}")
        return [answers[rank] for rank in range(self.size)]

    def _answers(self, limit: float) -> Iterator[tuple[int, bool | None, Any]]:
        """Yield ranks as they end, whether they ended well, and what they return or why not."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + limit
        while waiting:
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                yield from ((rank, False, "has not ended in time") for rank in waiting.values())
                return
            ended = [self._received(waiting.pop(connection)) for connection in ready]
            if not all(well for _, well, _ in ended):
                deadline = min(deadline, time.monotonic() + self._grace)
            # who has died did so before the others missed it
            yield from sorted(ended, key=lambda one: one[1] is not None)

    def _received(self, rank: int) -> tuple[int, bool | None, Any]:
        try:
            return rank, *pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return rank, None, f"has ended with status {self._processes[rank].wait()}"

    def _output(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank{rank}.txt")

    def close(self) -> None:
        """End the processes, and what they have started."""
        for process in self._processes:
            end(process)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


@contextmanager
def ranks(size: int, **options: Any) -> Iterator[Ranks]:
    """Start processes for what needs some of its own."""
    group = Ranks(size, **options)
    try:
        yield group
    finally:
        group.close()


_serving: Ranks | None = None


def run(
    function: Callable[..., Any], *arguments: Any, processes: int = 2, limit: float = LIMIT_S
) -> list[Any]:
    """Do what :meth:`Ranks.run` does, on the session's processes; they are started if need be."""
    global _serving
    if _serving is None or _serving.size != processes:
        stop()
        _serving = Ranks(processes)
    try:
        return _serving.run(function, *arguments, limit=limit)
    except BaseException:
        stop()  # what they do now nobody knows
        raise


@atexit.register
def stop() -> None:
    """End the session's processes."""
    global _serving
    if _serving is not None:
        _serving.close()
    _serving = None


def execute(*words: str, limit: float = LIMIT_S, **variables: str) -> str:
    """Run ``python WORDS`` to its end; return what it printed.

    Raises:
        AssertionError: it has not ended well, or not in ``limit`` seconds.
    """
    process = subprocess.Popen(
        [sys.executable, *words], env=environment(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit)
    finally:
        end(process)
    assert process.returncode == 0, said[-TAIL:]
    return said


def environment(**variables: str) -> dict[str, str]:
    """Return this one for a process that imports what this one does, on one core."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"DS_ACCELERATOR": "cpu"} | variables


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started in a session of its own, and all of that session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection: Connection) -> None:
    """Answer calls until nobody asks any more."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    while True:
        try:
            asked = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # what libraries do as an interpreter ends is not under test
        connection.send_bytes(pickle.dumps(_answer(asked)))


def _answer(asked: bytes) -> tuple[bool, Any]:
    """Return whether the call went well, and what it returned or the traceback."""
    before = dict(os.environ)  # transformers and accelerate write what they are told there
    torch.manual_seed(0)
    try:
        function, arguments = pickle.loads(asked)
        gc.collect()
        gc.freeze()  # what is imported: transformers asks for a collection in each run
        return True, function(*arguments)
    except BaseException:  # pytest's failures, an exit and Ctrl-C included
        return False, traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
