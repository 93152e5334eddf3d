"""``python -m benchmarks.gpu``: checks, benchmarks and tests of a GPU machine, in nine minutes.

Needs no network and no native extension. Everything goes to the folder that the variable OUT
names, by default ``benchmarks/results``, as it comes: a part that hangs or crashes is ended, and
the next begins. Whenever the job ends, the summary says what there is. The exit code is 1 where
anything failed, and 2 where there is no GPU. With ``--small`` the parts run on tiny shapes,
without the benchmarks and tests, and on a CPU too.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.job import ROOT, Job, Step, last_line, summary
from benchmarks.gpu.plan import FILE, LIMIT, PARTS
from benchmarks.gpu.steps import benchmark, install_wheels, report, run_part, run_tests

_FACTS = 60.0  # seconds at most, to find the GPU
_LOOK = """
import importlib.metadata as metadata, platform, torch
torch.ones(1, device="cuda").sum().item()  # it does not only exist
memory = torch.cuda.get_device_properties(0).total_memory / 2**30
installed = {each.name: each.version for each in metadata.distributions()}
names = ("torch", "triton", "transformers")  # some images have Triton under another name
versions = [f"{name} {installed.get(name, '(not found)')}" for name in names]
print(", ".join([torch.cuda.get_device_name(), f"{memory:.0f} GiB", *versions,
                 f"python {platform.python_version()}"]))
"""


def run(job: Job, small: bool) -> None:
    """Run everything, in the order of the plan."""
    for part in PARTS:
        run_part(job, part, small)
    if small:
        return
    install_wheels(job)
    benchmark(job)
    report(job)
    run_tests(job)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a CPU too")
    small = parser.parse_args(arguments).small
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results").resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, end = time.time(), time.monotonic() + LIMIT
    log = out / "gpu-log.txt"
    for path in (log, out / FILE):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(out=out, log=log, scratch=Path(scratch), end=end)
        code, said = job.python(["-c", _LOOK], _FACTS)
        if code != 0 and not small:
            print(f"no GPU to measure on: {last_line(said)}")
            return 2
        try:
            run(job, small)
        except KeyboardInterrupt:
            job.steps.append(Step(name="the job", state="failed", seconds=0.0, note="interrupted"))
        files = [path for path in out.rglob("*") if path.is_file()]
        new = sorted(path for path in files if path.stat().st_mtime >= started - 1)
        for line in summary(last_line(said), job, new):
            print(line[:160])
            with log.open("a") as file:
                file.write(f"{line}\n")
    return 0 if all(step.state == "ok" for step in job.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
