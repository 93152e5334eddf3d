"""Runs every part of the tests, each in its environment, and ends with a line on each.

``python -m tests.everything PYTHON``: PYTHON makes the environment of vLLM, this one the others.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
_OUTCOME = re.compile(r"^(SKIPPED: .*|=*.*\b\d+ \w+.* in \d[\d.]*s\b.*)$", re.MULTILINE)

Commands = dict[str, list[str]]  # by the name of a part


def in_pairs(python: str) -> Commands:
    """Return the parts that leave a core free, long ones first."""
    mine = sys.executable
    hosts = sorted(path.stem for path in (ROOT / "tests/integrations/hosts").glob("*.txt"))
    # the tests with vLLM report an installation that failed
    vllm = 'tests/vllm/install.sh .venv-vllm "$0" || true'
    return {
        "environment of vLLM": ["sh", "-c", vllm, python],
        "pretrained model": ["tests/real/run.sh", ".venv-real", mine],
        "DeepSpeed": ["tests/sharded/run.sh", ".venv-deepspeed", mine],
        **{host: ["tests/integrations/run.sh", ".venv-hosts", mine, host] for host in hosts},
    }


def one_by_one(python: str) -> Commands:
    """Return the parts that use two cores."""
    mine = sys.executable
    in_two = [mine, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m"]
    return {
        "kernels and trainer": [*in_two, "not long"],
        "long tests": [*in_two, "long"],
        "oldest Triton": ["tests/triton_compat.sh", ".venv-triton", mine],
        "sanitizers": ["tests/sanitized/run.sh", "build/sanitized", mine],
        "emulated GPU": ["tests/emulated/run.sh", "build/tinygrad", mine],
        "vLLM": ["tests/vllm/run.sh", ".venv-vllm", python],
    }


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)  # in one piece, whichever thread calls
    sys.stdout.flush()


def run(name: str, command: list[str], *, live: bool) -> tuple[bool, str]:
    """Run it, and show what it prints, at the end unless ``live``.

    Returns whether it succeeded and the line that says how.
    """
    title = f"\n{name}\n".encode()
    said = b""
    if live:
        _show(title)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1():
            said += chunk
            if live:
                _show(chunk)
    if not live:
        _show(title + said)
    outcomes = _OUTCOME.findall(said.decode(errors="replace"))
    status = f"exit status {process.returncode}"
    return process.returncode == 0, outcomes[-1].strip("= ") if outcomes else status


def main(pairs: Commands, others: Commands) -> int:
    """Run ``pairs`` two at a time, then each of the others; return 1 if a part failed, else 0."""
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(partial(run, live=False), pairs, pairs.values())
        outcomes = dict(zip(pairs, ended, strict=True))
    for name, command in others.items():
        outcomes[name] = run(name, command, live=True)
    print("\nall parts")
    for name, (succeeded, line) in outcomes.items():
        print(f"{'' if succeeded else 'FAILED':<8}{name:<22}{line}")
    return int(not all(succeeded for succeeded, _ in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(in_pairs(sys.argv[1]), one_by_one(sys.argv[1])))
