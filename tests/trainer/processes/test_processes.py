"""A run of two processes takes the steps of one: data parallel, FSDP2, ZeRO-1, 2 and 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from safetensors.torch import load_file

from grpo_trainer import GRPOConfig
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.policy import check_placement, placement_of
from tests.support import launch
from tests.support.placements import PLACEMENTS
from tests.trainer.processes import checks, features, optimizers
from tests.trainer.processes.features import SHARDED

pytestmark = pytest.mark.slow

FILES = launch.ROOT / "grpo_trainer" / "accelerate_configs"

# a function of a placement and of a folder that all processes share
Case = Callable[[str, str], dict[str, Any]]
EVERY = ("ddp", "fsdp2", "zero3")
REPLICAS_OR_FSDP2 = ("ddp", "fsdp2")
# embeddings cannot be sharded; ZeRO-1 and 2 differ from plain data parallelism by the engine
WHERE = {
    "nothing": (),
    "reference": (*EVERY, "zero1"),
    "token budget": (*EVERY, "zero2"),
    "tokens": ("ddp",),
    "tokens of both ends": REPLICAS_OR_FSDP2,
}
# what each process finds is what one finds
COMPARED: dict[str, tuple[Case, tuple[str, ...]]] = {
    **{name: (partial(features.run, name), WHERE.get(name, EVERY)) for name in features.FEATURES},
    "generation": (checks.generation, SHARDED),
    "a policy by name": (checks.loading, SHARDED),
    "an interruption": (checks.interrupted, REPLICAS_OR_FSDP2),
}
INSTEAD: dict[str, Case] = {"an interruption": checks.uninterrupted}  # what one process does
# what asserts by itself
OTHERS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "streamed weights": (checks.streamed, SHARDED),
    "checkpoints": (checks.checkpoints, ("ddp", "fsdp2", "zero2", "zero3")),
    "groups in flight": (checks.in_flight, REPLICAS_OR_FSDP2),
    "what cannot work": (checks.refused, ("fsdp2", "zero2", "zero3")),
    "what one process finds": (checks.found_by_one, ("ddp",)),
    "replayed groups": (checks.replayed, ("ddp",)),
    "small states": (optimizers.small_states, ("ddp", "fsdp2", "zero2", "zero3")),
    "states in main memory": (optimizers.in_main_memory, ("fsdp2", "zero2", "zero3")),
    "weights that placing casts": (optimizers.weights_that_placing_casts, ("fsdp2", "zero2")),
    "optimizers that cannot work": (optimizers.refused, ("fsdp2", "zero2")),
}
# padding is to the longest row of a process
OF_PADDING = (
    "frac_rows_skipped", "micro_batches/number", "micro_batches/padding",
    "micro_batches/shared_tokens",
)  # fmt: skip
# of weights: a hundredth of a step of Adam, which divides gradients near 0 by their rounding
ATOL = {"adam, a stream": 1e-5}


def placed(cases: dict[str, tuple[Case, tuple[str, ...]]]) -> list[Any]:
    """Return each case with each of its placements, those of a placement one after the other."""
    return [
        pytest.param(name, placement, marks=[pytest.mark.deepspeed] * placement.startswith("zero"))
        for placement in PLACEMENTS
        for name, (_, places) in cases.items()
        if placement in places
    ]


def together(case: Case, placement: str, folder: Path) -> list[dict[str, Any]]:
    """Return what each of two processes finds."""
    if placement.startswith("zero"):
        pytest.importorskip("deepspeed")
    return launch.run(case, placement, str(folder))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """Return what one process finds, once for all placements."""

    @cache
    def find(name: str) -> dict[str, Any]:
        case = INSTEAD.get(name, COMPARED[name][0])
        return case("one", str(tmp_path_factory.mktemp("one")))

    return find


@pytest.mark.parametrize(("name", "placement"), placed(COMPARED))
def test_several_processes_are_one_process(name, placement, alone, tmp_path):
    first, _ = together(COMPARED[name][0], placement, tmp_path)
    one = alone(name)
    assert first.keys() <= one.keys()
    for key, found in first.items():
        if key.startswith("log"):
            assert_logs_are_alike(found, one[key])
        elif key == "weights":
            atol = ATOL.get(name, 2e-6)
            torch.testing.assert_close(found, one[key], rtol=0, atol=atol)
        else:
            assert found == (pytest.approx(one[key], rel=1e-5) if key == "evaluated" else one[key])


def assert_logs_are_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for row, alone in zip(found, expected, strict=True):
        assert row == {n: pytest.approx(x, rel=2e-5, abs=1e-6) for n, x in alone.items()} | {
            name: row[name] for name in row if name.endswith(OF_PADDING)
        }


@pytest.mark.parametrize(("name", "placement"), placed(OTHERS))
def test_several_processes(name, placement, tmp_path):
    together(OTHERS[name][0], placement, tmp_path)


def test_completions_are_cut_into_as_many_micro_batches_on_each_process(tmp_path):
    every = launch.run(checks.budgeted, "ddp", str(tmp_path))
    first, second = (found["lengths"] for found in every)
    assert len(first) == len(second) == max(found["alone"] for found in every)
    assert every[0]["alone"] > every[1]["alone"] > 1
    for part in (*first, *second):
        assert 0 < len(part) * max(part) <= 26
    assert sum(map(len, first)) == sum(map(len, second)) == 8
    longest = max(map(max, first))  # which the second process has not
    assert longest > max(map(max, second))
    for found in every:
        assert f"max_tokens_per_micro_batch: expected at least {longest}, " in found["error"]


def test_a_process_that_dies_ends_the_run(tmp_path):
    """The other one does not wait for it."""
    with pytest.raises(launch.RanksFailedError) as caught:
        launch.run(checks.death, "fsdp2", str(tmp_path))
    dead, other = str(caught.value).split("rank 0: ")
    assert dead == "rank 1: has ended with status 3\n"
    assert "Connection" in other


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_for_accelerate(path):
    """Those of other placements than the two below differ by what is read here."""
    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, *_ = _validate_launch_command(args)
    assert (args.num_processes, args.use_fsdp, args.use_deepspeed) == (
        1 if path.stem == "single_gpu" else 8, path.stem == "fsdp2", path.stem.startswith("zero"),
    )  # fmt: skip
    if args.use_deepspeed:
        assert f"zero{args.zero_stage}" == path.stem


@pytest.mark.long
@pytest.mark.parametrize("placement", ["fsdp2", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_the_files_for_accelerate_run(placement, tmp_path):
    """Start FSDP2 as on two machines, and DeepSpeed on one."""
    machines = 2 if placement == "fsdp2" else 1
    if placement == "zero3":
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
    accelerate = {
        "--config_file": FILES / f"{placement}.yaml",
        "--num_processes": 2,
        "--num_machines": machines,
        "--mixed_precision": "no",
        "--main_process_ip": "127.0.0.1",
        "--main_process_port": launch.free_port(),
    }
    script = ["--module", "tests.trainer.processes.train_on_cpus"]

    def start(machine: int) -> str:
        words = [*flat(accelerate), "--machine_rank", str(machine), *script, *flat(options)]
        return launch.execute("-m", "accelerate.commands.launch", *words, CUDA_VISIBLE_DEVICES="")

    with ThreadPoolExecutor(machines) as pool:
        list(pool.map(start, range(machines)))
    assert (tmp_path / "out/checkpoint-2/SHA256SUMS").exists()
    assert not (tmp_path / "out/checkpoint-2/model.safetensors").exists()
    assert load_file(tmp_path / "out" / "model.safetensors")


def flat(options: dict[str, object]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]


# accelerate takes CPU processes for plain data parallelism, whatever it is asked
PLAIN = {"parallelism_config": None, "distributed_type": DistributedType.MULTI_CPU}
TENSORS = {"parallelism_config": SimpleNamespace(tp_size=2, cp_size=1, sp_size=1)}

SHARDS = "fsdp: expected processes with a GPU each, over which"


@pytest.mark.parametrize(
    ("settings", "asked", "found", "message"),
    [
        ({"fsdp": True}, "no", PLAIN, SHARDS),
        ({}, "true", PLAIN, SHARDS),
        ({}, "no", TENSORS, "parallelism_config: expected only data .*, got tp_size=2"),
    ],
    ids=["plain", "launched", "tensors"],
)
def test_other_placements_are_refused(tmp_path, monkeypatch, settings, asked, found, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", asked)  # as `accelerate launch` says it
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **settings)
    with pytest.raises(ValueError, match=message):
        check_placement(args, SimpleNamespace(state=SimpleNamespace(), **found))


def test_fsdp1_is_refused():
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    with pytest.raises(ValueError, match="fsdp_version: expected 2"):
        placement_of(SimpleNamespace(state=state))
