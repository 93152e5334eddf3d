"""Runs every part of the tests, each in its environment, and ends with a line on each.

``python -m tests.everything PYTHON``: PYTHON makes the environment of vLLM, this one the others.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_OUTCOME = re.compile(r"^(SKIPPED: .*|=*.*\b\d+ \w+.* in \d[\d.]*s\b.*)$", re.MULTILINE)


def parts(python: str) -> dict[str, list[str]]:
    """Return the commands of all parts by their names."""
    mine = sys.executable
    hosts = sorted(path.stem for path in (ROOT / "tests/integrations/hosts").glob("*.txt"))
    return {
        "kernels and trainer": [mine, "-m", "pytest", "-n", "2"],
        "oldest Triton": ["tests/triton_compat.sh", ".venv-triton", mine],
        "sanitizers": ["tests/sanitized/run.sh", "build/sanitized", mine],
        "emulated GPU": ["tests/emulated/run.sh", "build/tinygrad", mine],
        "DeepSpeed": ["tests/sharded/run.sh", ".venv-deepspeed", mine],
        "pretrained model": ["tests/real/run.sh", ".venv-real", mine],
        **{host: ["tests/integrations/run.sh", ".venv-hosts", mine, host] for host in hosts},
        "vLLM": ["tests/vllm/run.sh", ".venv-vllm", python],
    }


def run(command: list[str]) -> tuple[bool, str]:
    """Run it, show what it prints; return whether it went well and the line that says how."""
    said = b""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1():
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            said += chunk
    found = _OUTCOME.findall(said.decode(errors="replace"))
    ended = process.returncode == 0
    return ended, found[-1].strip("= ") if found else f"exit status {process.returncode}"


def main(commands: dict[str, list[str]]) -> int:
    """Return the exit status: 1 where a part failed."""
    outcomes = {}
    for name, command in commands.items():
        print(f"\n{name}", flush=True)
        outcomes[name] = run(command)
    print("\nall parts")
    for name, (well, line) in outcomes.items():
        print(f"{'' if well else 'FAILED':<8}{name:<22}{line}")
    return int(not all(well for well, _ in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(parts(sys.argv[1])))
