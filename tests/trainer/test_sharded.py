"""A run whose policy is sharded takes the steps of one process: FSDP2, ZeRO-1, 2 and 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from filelock import FileLock
from safetensors.torch import load_file

from grpo_trainer.demo.policy import write_policy
from grpo_trainer.model import check_placement
from grpo_trainer.sharding import placement_of
from tests.trainer import sharded_runs
from tests.trainer.sharded_runs import CASES, PLACEMENTS, STEPS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sharded_runs.py")
ON_CPUS = Path(__file__).with_name("train_on_cpus.py")
FILES = Path(__file__).parents[2] / "grpo_trainer" / "accelerate_configs"
# of weights: a hundredth of a step of Adam, which divides gradients near 0 by their rounding
ATOL = 1e-5
CHECKED = [name for name in sharded_runs.CHECKS if name != "death"]
# what each placement runs: ZeRO-1 and 2 differ from plain data parallelism by the engine alone
WANTED = {
    "fsdp2": [*CASES, *CHECKED],
    "zero1": ["dapo", "reference"],
    "zero2": ["adam", "lora", "checkpoints", "refused"],
    "zero3": [*CASES, *CHECKED],
}
_DEEPSPEED = pytest.mark.deepspeed
KINDS = [
    pytest.param(kind, marks=[_DEEPSPEED] * kind.startswith("zero"))
    for kind in PLACEMENTS
    if kind != "one"
]


def pairs(names: Any) -> list[Any]:
    """Return the kinds with those of ``names`` that each runs."""
    return [
        pytest.param(kind.values[0], name, marks=kind.marks)
        for kind in KINDS
        for name in names
        if name in WANTED[kind.values[0]]
    ]


def launch(folder: Path, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return execute(*torchrun, str(SCRIPT), str(folder), *words, timeout=timeout)


def execute(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    return subprocess.run(
        [sys.executable, "-m", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Results:
    """What the runs came to, each made when it is asked for first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._alone: dict[str, Any] = {}
        self._kinds: dict[str, Any] = {}

    def alone(self, name: str) -> Any:
        if name not in self._alone:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "one")
            self._alone |= sharded_runs.main(str(self._folder / worker), "one", [name])
        return self._alone[name]

    def sharded(self, kind: str, name: str) -> Any:
        if kind not in self._kinds:
            if kind.startswith("zero"):
                pytest.importorskip("deepspeed")
            self._launch(kind[:4])
            self._kinds[kind] = torch.load(self._folder / f"{kind}.pt")
        return self._kinds[kind][name]

    def _launch(self, family: str) -> None:
        """Run all kinds of a family in one launch, once for all workers of pytest."""
        log = self._folder / f"{family}.txt"
        with FileLock(f"{log}.lock"):
            if not log.exists():
                kinds = [kind for kind in WANTED if kind.startswith(family)]
                words = [f"{kind}:{','.join(WANTED[kind])}" for kind in kinds]
                done = launch(self._folder, *words)
                log.write_text("" if done.returncode == 0 else done.stderr[-6000:])
        assert log.read_text() == ""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "sharded"
    folder.mkdir(exist_ok=True)
    return Results(folder)


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for row, alone in zip(found, expected, strict=True):
        assert row == {n: pytest.approx(x, rel=2e-5, abs=1e-6) for n, x in alone.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(("kind", "name"), pairs(CASES))
def test_a_run_equals_that_of_one_process(results, kind, name):
    found, alone = results.sharded(kind, name), results.alone(name)
    assert_alike(found["log"], alone["log"])
    assert {"loss", "reward", "grad_norm", "entropy"} <= set(found["log"][0])
    assert len([row for row in found["log"] if "loss" in row]) == STEPS
    torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=ATOL)
    assert found["held"] == pytest.approx(0.5 if kind in ("fsdp2", "zero3") else 1.0, abs=0.02)


def test_the_runs_are_what_they_say(results):
    logs = {name: results.alone(name)["log"] for name in CASES}
    assert all("kl" in logs[name][-1] for name in ("reference", "tied", "lora"))
    assert any("eval_reward" in row for row in logs["evaluation"])
    assert logs["dapo"][0]["grad_norm"] > CASES["dapo"]["max_grad_norm"]  # it is clipped


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(("kind", "name"), pairs(["generation"]))
def test_generation(results, kind, name, gathers):
    """Before, in and after training; a process without prompts takes part."""
    found, alone = (part[gathers] for part in (results.sharded(kind, name), results.alone(name)))
    assert found["seen"] == alone["seen"]
    assert found["seen"][0] != found["seen"][1] == found["seen"][2]
    assert_alike(found["log"], alone["log"])


@pytest.mark.parametrize(("kind", "name"), pairs(["stream"]))
def test_weights_are_streamed(results, kind, name):
    """One process sends, all gather; never much more than a parameter is in memory."""
    for found in results.sharded(kind, name).values():
        assert found["failed"] == "half way"
        assert_equal(found["sent"], found["weights"])
        # one that is gathered, what it is put together from, and the parts of the one before, which
        # the thread that communicates may not yet have let go
        assert 0 < found["peak"] <= 3 * found["largest"] + 1024 < found["total"] / 2


@pytest.mark.parametrize("model", ["reference", "lora"])
@pytest.mark.parametrize(("kind", "name"), pairs(["checkpoints"]))
def test_checkpoints(results, kind, name, model):
    found = results.sharded(kind, name)[model]
    for resumed in ("resumed", "finished"):
        assert_equal(found[resumed], found["straight"])
    straight, resumed = found["logs"]
    assert straight == resumed
    assert_equal(found["loaded"], found["straight"])
    shards = {"fsdp2": "pytorch_model_fsdp_0/__1_0.distcp"}
    name = shards.get(kind, "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert {name, "checksums.json", "process_state_1.pt"} <= set(found["files"])
    weights = "adapter_model.safetensors" if model == "lora" else "model.safetensors"
    assert (weights in found["files"]) == (kind == "zero2")


@pytest.mark.parametrize(("kind", "name"), pairs(["loading"]))
def test_a_policy_by_name(results, kind, name):
    """It is loaded in shards where the placement can, its reference is copied from shards."""
    found, alone = results.sharded(kind, name), results.alone(name)
    assert_alike(found["log"], alone["log"])
    torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=ATOL)
    assert found["held"] == (0.5 if kind == "zero3" else 1.0)
    if found["evaluated"] is not None:
        assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)


@pytest.mark.parametrize(("kind", "name"), pairs(["refused"]))
def test_what_cannot_work_is_refused(results, kind, name):
    found = results.sharded(kind, name)
    assert "cast_lm_head_to_fp32: expected False" in found["fp32 head"]
    if kind in ("fsdp2", "zero3"):
        assert "ds3_gather_for_generation: expected True" in found["continuous"]
    assert "overlap_generation: expected an engine with weights of its own" in found["overlap"]
    if kind != "fsdp2":
        assert "evaluate: expected it during or after train" in found["evaluate"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_for_accelerate_run(tmp_path, kind):
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed")
    write_policy(tmp_path / "policy", seed=0)
    rows = [json.dumps({"prompt": f"{n}="}) for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    options = {
        "--model_name_or_path": tmp_path / "policy",
        "--dataset_name": tmp_path / "prompts.jsonl",
        "--reward_funcs": "think_format_reward",
        "--output_dir": tmp_path / "out",
        "--num_generations": 4,
        "--max_completion_length": 4,
        "--max_steps": 2,
        "--logging_steps": 1,
        "--beta": 0.1,
    }
    accelerate = ["accelerate.commands.launch", "--config_file", str(FILES / f"{kind}.yaml")]
    accelerate += ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
    run = [str(word) for pair in options.items() for word in pair]
    done = execute(*accelerate, str(ON_CPUS), *run)
    assert done.returncode == 0, done.stderr[-6000:]
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert "out/checkpoint-2/checksums.json" in files
    assert ("out/checkpoint-2/model.safetensors" in files) == (kind in ("zero1", "zero2"))
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_fsdp1_is_refused():
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    with pytest.raises(ValueError, match="fsdp_version: expected 2"):
        placement_of(SimpleNamespace(state=state))


def test_shards_that_would_not_be_are_refused(make_args, monkeypatch):
    """accelerate takes CPU processes for plain data parallelism, whatever it is asked."""
    found = SimpleNamespace(
        state=SimpleNamespace(), parallelism_config=None, distributed_type=DistributedType.MULTI_CPU
    )
    message = "fsdp: expected processes that accelerate shards a model over"
    with pytest.raises(ValueError, match=message):
        check_placement(make_args(fsdp=True), found)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch` says it
    with pytest.raises(ValueError, match=message):
        check_placement(make_args(), found)


def test_other_parallelism_is_refused(make_args):
    sizes = SimpleNamespace(tp_size=2, cp_size=1, sp_size=1)
    found = SimpleNamespace(state=SimpleNamespace(), parallelism_config=sizes)
    with pytest.raises(ValueError, match="parallelism_config: expected data .*, got tp_size=2"):
        check_placement(make_args(), found)


def test_a_process_that_dies_ends_the_run(tmp_path):
    done = launch(tmp_path, "fsdp2:death", timeout=120)
    assert done.returncode != 0
    assert "exitcode  : 3" in done.stderr
