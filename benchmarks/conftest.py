"""``--full`` adds the large shapes to the suite."""

from __future__ import annotations

import pytest

from benchmarks.shapes import FULL, QUICK


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also measure the large shapes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape_name" in metafunc.fixturenames:
        names = FULL if metafunc.config.getoption("--full") else QUICK
        metafunc.parametrize("shape_name", names, scope="module")
