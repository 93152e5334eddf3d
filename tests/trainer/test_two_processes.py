"""Data parallelism changes nothing: same rollouts, same parameters, same metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import two_processes

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("two_processes.py")
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # --multi_gpu is accelerate's name for one process per device; use_cpu makes it CPU processes
    "accelerate launch": [
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    ],
}  # fmt: skip
BY_ACCELERATE = {"dapo", "reference"}


def launch(launcher: str, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(SCRIPT), str(folder), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[dict, dict]:
    """Return the results of one process, and of two."""
    names = list(two_processes.RUNS)
    others = [name for name in names if name not in BY_ACCELERATE]
    together = launch("torchrun", others, tmp_path_factory.mktemp("torchrun"))
    accelerated = tmp_path_factory.mktemp("accelerate")
    together |= launch("accelerate launch", sorted(BY_ACCELERATE), accelerated)
    return two_processes.main(str(tmp_path_factory.mktemp("one")), names), together


@pytest.mark.parametrize("name", two_processes.RUNS)
def test_two_processes_equal_one(results, name):
    alone, together = (result[name] for result in results)
    torch.testing.assert_close(together["parameters"], alone["parameters"], rtol=0, atol=2e-6)
    assert {"reward", "loss", "entropy", "grad_norm"} <= set(alone["metrics"])
    assert together["metrics"] == {
        key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in alone["metrics"].items()
    }


def test_the_runs_are_what_they_say(results):
    alone, _ = results
    assert alone["dynamic"]["metrics"]["dynamic_sampling/discarded_groups"] > 0
    assert alone["adaptive entropy"]["metrics"]["entropy_coef"] == pytest.approx(0.105 + 0.0025)
    assert "eval_reward" in alone["evaluation"]["metrics"]
    assert "eval_reward" in alone["stream"]["metrics"]
    for result in results:
        for name in ("resumed", "interrupted"):
            assert torch.equal(result[name]["parameters"], result["dynamic"]["parameters"]), name
    assert alone["overlap"]["metrics"]["sampling/staleness"] == 0.5  # 0 and 1 steps
    same = torch.equal(alone["dapo"]["parameters"], alone["bnpo"]["parameters"])
    assert same  # one micro-batch per step: their means are over the same tokens
    assert not torch.equal(alone["dapo"]["parameters"], alone["grpo"]["parameters"])
