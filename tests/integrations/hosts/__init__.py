"""Which packages the tests of a host need: those that ``<host>.txt`` pins, over the others' own.

They are installed with ``pip install --no-deps -r``, into an environment for this host alone.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def need(host: str) -> None:
    """Skip a module of tests where a package of ``host`` is not here as it is pinned."""
    for name, pinned in pins(host).items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != pinned:
            pytest.skip(
                f"NOTHING OF {host} WAS TESTED: expected {name} {pinned}, got {found}; it takes an "
                f"environment with tests/integrations/hosts/{host}.txt",
                allow_module_level=True,
            )


def pins(host: str) -> dict[str, str]:
    text = (Path(__file__).parent / f"{host}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
