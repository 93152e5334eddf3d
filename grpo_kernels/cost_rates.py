"""Fitted speeds of the schedules. Written by ``python -m benchmarks.tune --schedules``, which
``make gpu-tune`` runs, too; a change by hand is lost at its next run.

A device that is missing here runs by the guesses of ``cost.py``, which also names the coefficients.
"""

from __future__ import annotations

# device class -> what its entries were measured on
MEASURED_ON: dict[str, dict[str, str]] = {
    "cpu amx": {
        "commit": "15dc06e",
        "date": "2026-11-21",
        "device": "Intel(R) Xeon(R) Processor",
        "threads": "2",
        "torch": "2.13.0",
    },
}

# device class, dtype -> coefficients, in the order of ``cost.FITTED``
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("cpu amx", "bf16"): (1.77e12, 1.51e12, 2.83e12, 1.51e10, 4.66e09, 0.00326, 0.0029),
    ("cpu amx", "fp32"): (3.4e11, 3.4e11, 5e11, 1.1e10, 1e11, 0.004, 0.003),
}
