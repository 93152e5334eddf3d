"""The example with an environment of openenv runs as it stands."""

from __future__ import annotations

from tests.integrations.hosts import need

need("openenv")

from tests.support.examples import run_example

BLIND = 0.34  # the second guess is right by chance, after another first one


def test_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    last, first, _ = run_example("openenv_env", capsys)
    assert last > max(first, BLIND)
