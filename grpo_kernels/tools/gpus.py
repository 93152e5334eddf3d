"""GPUs by their names: what GEMMs reach at most, and how much memory they have."""

from __future__ import annotations

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU."""

    name: str
    pattern: str  # of what a driver or a user calls it
    tflops: tuple[float, float]  # in 16 bits and in fp32: dense GEMMs with fp32 sums, by data sheet
    gib: int  # of memory that torch reports, rounded down


# the first pattern that matches decides
GPUS = (
    Gpu("H100 SXM", r"\bh100\b(?!.*(pcie|nvl))", (989, 67), 79),
    Gpu("H200", r"\bg?h200\b", (989, 67), 139),
    Gpu("B200", r"\bg?b200\b", (2250, 75), 178),
    Gpu("A100 40GB", r"\ba100\b.*\b40gb\b", (312, 19.5), 39),
    Gpu("A100", r"\ba100\b", (312, 19.5), 79),
    Gpu("L40S", r"\bl40s\b", (362, 91.6), 44),
    Gpu("L4", r"\bl4\b", (121, 30.3), 22),
    Gpu("RTX 3090", r"\brtx 3090\b(?! ti)", (71, 35.6), 23),
    Gpu("RTX 4090", r"\brtx 4090\b(?! d)", (165, 82.6), 23),
    Gpu("RTX 5090", r"\brtx 5090\b(?! d)", (209.5, 104.8), 31),
    Gpu("MI300X", r"\bmi300x\b", (1307, 163.4), 191),
)
GPU_NAMES = ", ".join(gpu.name for gpu in GPUS)


def find_gpu(name: str) -> Gpu | None:
    """Return the row of ``GPUS`` for a device's name; None when it is not in the table."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, plain)), None)


def gpu_named(name: str) -> Gpu:
    """Return the row of ``GPUS`` that a user names, or raise ValueError."""
    gpu = find_gpu(name)
    if gpu is None:
        raise ValueError(f"gpu: expected one of {GPU_NAMES}; got {name!r}")
    return gpu
