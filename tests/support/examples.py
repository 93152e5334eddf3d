"""Runs a script of docs/examples."""

from __future__ import annotations

import re
import runpy

from tests.support.documents import ROOT

FOLDER = ROOT / "docs" / "examples"


def run_example(name: str, capsys) -> tuple[float, float, str]:
    """Run a script; return the rewards at last and at first, which it prints, and all it prints."""
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    [(last, first)] = re.findall(r"^final reward (\S+), at first (\S+)$", said, re.MULTILINE)
    return float(last), float(first), said
