"""``grpo-kernels doctor``: it tries the hosts that are here, and says who disagrees."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import liger
from grpo_kernels.losses import PolicyLossOutput
from grpo_kernels.tools import cli, doctor
from tests.parity.accelerate_state import accelerate_state


@pytest.mark.slow
def test_the_hosts_that_are_here() -> None:
    pytest.importorskip("trl")
    command = [sys.executable, "-W", "ignore", "-m", "grpo_kernels.tools.cli", "doctor"]
    run = subprocess.run(command, capture_output=True, text=True)  # where no trainer of TRL's is
    assert run.returncode == 0, run.stdout + run.stderr
    assert "trl: 1.16" in run.stdout
    assert run.stdout.count("  ok\n") >= 1
    assert "prime_rl: not installed (tested with 0.8)" in run.stdout
    assert "nothing wrong was found" in run.stdout


def only(monkeypatch: pytest.MonkeyPatch, make: doctor.Step | str | None) -> doctor.Finding:
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(doctor, "HOSTS", {"liger": make})
    (finding,) = doctor.findings()
    return finding


@pytest.mark.slow
def test_who_disagrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> doctor.Step:
        value = torch.tensor(1.0 + 0.01 * liger.SWITCH.on)
        return lambda: [value]

    assert not only(monkeypatch, make).ok
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert "not as their own: liger" in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_goes_through_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """In mixed precision, which walks the output of a forward."""
    pytest.importorskip("trl")

    def convert(output: Any) -> Any:
        if isinstance(output.get("head"), PolicyLossOutput):
            raise TypeError("no such output")
        return output

    monkeypatch.setattr("accelerate.utils.operations.convert_to_fp32", convert)
    monkeypatch.setattr(doctor, "HOSTS", {"trl": doctor.HOSTS["trl"]})
    with accelerate_state({}):
        (finding,) = doctor.findings()
    assert finding.failure == "TypeError: no such output"


def test_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(monkeypatch, "no trial: because").note == "no trial: because"
    with liger.enabled():
        found = only(monkeypatch, lambda: pytest.fail("not to be built"))
        assert found.on
        assert found.note == "no trial: theirs has been replaced"
    monkeypatch.setattr(doctor, "version", lambda package: "0.0.1")
    monkeypatch.setattr("grpo_kernels.integrations.switch.version", lambda package: "0.0.1")
    assert "0.8.5, got 0.0.1" in only(monkeypatch, "no trial").note
