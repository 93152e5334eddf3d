"""Fitted speeds of the schedules. Written by ``python -m benchmarks.tune --schedules``, which
``make gpu-tune`` runs, too; a change by hand is lost at its next run.

A device that is missing here runs by the guesses of ``cost.py``, which also names the coefficients.
"""

from __future__ import annotations

# device class -> what its entries were measured on
MEASURED_ON: dict[str, dict[str, str]] = {
    "cpu amx": {
        "commit": "f3024d094efc",
        "date": "2026-11-21",
        "device": "Intel(R) Xeon(R) Processor",
        "threads": "2",
        "torch": "2.13.0+cpu",
    },
}

# device class, dtype -> coefficients, in the order of ``cost.FITTED``
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("cpu amx", "bf16"): (1.8e12, 1.61e12, 3.12e12, 1.21e10, 2.01e10, 0.000974, 0.00573),
    ("cpu amx", "fp32"): (4.05e11, 4.05e11, 3.82e11, 1.34e10, 2.41e10, 0.0016, 0.00609),
}
