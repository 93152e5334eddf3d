"""The generated table of fitted speeds: read, changed, written."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tune.table import dict_text
from grpo_kernels.tools.estimate import cost_rates

PATH = Path(cost_rates.__file__)

_HEADER = '''\
"""Fitted speeds of the schedules. Written by ``python -m benchmarks.tune --schedules``, which
``make gpu-tune`` runs, too; a change by hand is lost at its next run.

A device that is missing here runs by the guesses of ``cost.py``, which also names the coefficients.
"""

from __future__ import annotations
'''


@dataclass(frozen=True, kw_only=True)
class RatesTable:
    """The dictionaries of the file."""

    measured_on: dict[str, dict[str, str]]
    rates: dict[tuple[str, str], tuple[float, ...]]

    def with_device(
        self, device_class: str, facts: dict[str, str], rates: dict[str, tuple[float, ...]]
    ) -> RatesTable:
        """All entries of one device replaced by ``rates``, which are by dtype."""
        others = {key: row for key, row in self.rates.items() if key[0] != device_class}
        new = {(device_class, dtype): row for dtype, row in rates.items()}
        return RatesTable(
            measured_on={**self.measured_on, device_class: facts}, rates={**others, **new}
        )

    def text(self) -> str:
        """The file; formatted as ruff would."""
        return (
            f"{_HEADER}\n"
            "# device class -> what its entries were measured on\n"
            f"MEASURED_ON: dict[str, dict[str, str]] = {dict_text(self.measured_on)}\n\n"
            "# device class, dtype -> coefficients, in the order of ``cost.FITTED``\n"
            f"RATES: dict[tuple[str, str], tuple[float, ...]] = {dict_text(self.rates)}\n"
        )

    def write(self, path: Path = PATH) -> None:
        path.write_text(self.text())


def read(path: Path = PATH) -> RatesTable:
    """The file as it is on disk."""
    values = runpy.run_path(str(path))
    return RatesTable(measured_on=values["MEASURED_ON"], rates=values["RATES"])
