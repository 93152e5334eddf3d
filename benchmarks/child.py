"""Calls in a process of their own.

For the resident memory of a CPU process, for who may hang and must be killed, and for who changes
the process that it is in.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.results import ROOT

_LONGEST = 1800.0  # seconds of a process that is not expected to hang


class ChildError(RuntimeError):
    """What a process that failed said last, or that it hung."""


def ask(
    call: Callable[..., Any], *arguments: Any, timeout: float = _LONGEST, **environment: str
) -> Any:
    """Return what a module's function returns for ``arguments`` in a fresh process.

    Raises:
        ChildError: the process failed, or it took longer than ``timeout`` and was ended.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.child"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        said, complained = process.communicate(pickle.dumps((call, arguments)), timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ChildError(f"did not finish in {timeout:.0f} s") from None
    finally:
        if process.poll() is None:  # end it with what it started, a server maybe
            import psutil

            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
    if process.returncode != 0:
        complaints = complained.decode(errors="replace").strip()[-5000:]
        print(complaints, file=sys.stderr)
        last = complaints.splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise ChildError(last[0][:200])
    return pickle.loads(said)


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
        call, arguments = pickle.load(sys.stdin.buffer)
        pickle.dump(call(*arguments), answer)
