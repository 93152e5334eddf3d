"""GPUs by name: peak rates of GEMMs, and memory."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU, as ``gpus.toml`` describes it."""

    name: str
    pattern: str  # matches the names that drivers and users give it
    tflops: float  # dense GEMMs with 16-bit inputs, from the data sheet
    tflops_fp32: float
    gib: int  # memory


_SHEETS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
GPUS = [Gpu(**sheet) for sheet in _SHEETS["gpus"]]
GPU_NAMES = ", ".join(gpu.name for gpu in GPUS)


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU with this name; None if it is unknown."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, plain)), None)


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name; raise ValueError if it is unknown."""
    gpu = find_gpu(name)
    if gpu is None:
        raise ValueError(f"gpu: expected one of {GPU_NAMES}; got {name!r}")
    return gpu
