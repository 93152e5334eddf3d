"""The errors of :mod:`tests.emulated.mutations` are in step with the kernels and their tests."""

from __future__ import annotations

import pytest

from tests.emulated.mutations import MUTATIONS, ROOT, path_of


@pytest.mark.parametrize("name,before,after,where", MUTATIONS)
def test_a_phrase_and_a_test_exist(name: str, before: str, after: str, where: str) -> None:
    test, words = where.split()
    assert before in path_of(name).read_text() and before != after
    assert words in (ROOT / "tests" / "backends" / test).read_text()
