"""The example with an environment of verifiers runs as it stands."""

from __future__ import annotations

from tests.integrations.hosts import need

need("verifiers")

from tests.support.examples import run_example

BLIND = 0.6  # a policy that never looks gets 0.25, one that always does 0.5 and half of the rest


def test_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    last, first, _ = run_example("verifiers_env", capsys)
    assert last > max(first, BLIND)
