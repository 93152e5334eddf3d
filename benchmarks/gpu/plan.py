"""The parts of the job, in their order: what is dearest to know comes first."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 520.0  # seconds in all
FILE = "gpu-parts.jsonl"  # one for all parts: a remote machine may hand back a few files only
SHOWN = ("FAILED", "ERROR", "* ")  # how lines begin that belong on the last screen


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of the job."""

    name: str
    seconds: float  # after which it is ended, start and compilation included
    function: str = ""  # "module:name" here, called with the notes and whether it is small; or ...
    tests: tuple[str, ...] = ()  # ... those of pytest's marker "gpu" in these files
    needs_gpu: bool = False


PARTS = (
    Part(name="smoke", seconds=50, function="smoke:smoke"),
    Part(name="canaries", seconds=25, function="exactness:canaries"),
    Part(name="races", seconds=55, function="races:races"),
    Part(name="bits", seconds=30, function="exactness:bits"),
    Part(name="waiting", seconds=25, function="waiting:waiting", needs_gpu=True),
    Part(name="capture", seconds=30, tests=("tests/schedule/test_capture.py",), needs_gpu=True),
    Part(name="products", seconds=40, function="products:products"),
    Part(name="rows", seconds=40, function="tiles:rows"),
    Part(name="profiles", seconds=30, function="profiles:profiles", needs_gpu=True),
    Part(name="forward", seconds=40, function="tiles:forward"),
    Part(name="chunks", seconds=35, function="chunks:chunks"),
)
