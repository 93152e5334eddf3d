"""Measurements in a process of their own.

For the resident memory of a CPU process, for who may hang and must be killed, and for who changes
the process that it is in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.environment import ROOT


def ask(module: str, words: list[str], timeout: float, **environment: str) -> dict[str, Any]:
    """Return the JSON that ``python -m module`` prints last; a ``failure`` if it fails or hangs."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complained = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failure": f"did not finish in {timeout:.0f} s"}
    finally:
        _end(process)
    if process.returncode != 0:
        print(complained[-5000:], file=sys.stderr)
        last = complained.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"failure": last[0][:200]}
    return json.loads(said.splitlines()[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """End it with what it started, a server maybe."""
    if process.poll() is None:
        import psutil

        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
