"""A run of two processes takes the steps of one: data parallel, FSDP2, ZeRO-1, 2 and 3."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
from tests.trainer.processes import checks, features
from tests.trainer.processes.features import FEATURES, STEPS

pytestmark = pytest.mark.slow

FILES = launch.ROOT / "grpo_trainer" / "accelerate_configs"
SHARDED = ("fsdp2", "zero3")
# ZeRO-1 and 2 differ from plain data parallelism by the engine alone
FEW = {"zero1": ("clipped", "reference", "token budget"), "zero2": ("adam", "lora", "token budget")}
# embeddings that cannot be sharded
BEYOND = {("fsdp2", "tokens"), ("zero3", "tokens"), ("zero3", "tokens of both ends")}
# of weights: a hundredth of a step of Adam, which divides gradients near 0 by their rounding
ATOL = {"adam": 1e-5}
SELDOM = ("accumulated", "iterations")  # log their two steps together
# of a log: that the feature was there
SHOWN: dict[str, Callable[[list[dict[str, float]]], bool]] = {
    **dict.fromkeys(["reference", "packed", "tied", "lora", "images"], lambda log: "kl" in log[-1]),
    **dict.fromkeys(["evaluation", "stream", "tools"], lambda log: "eval_reward" in log[-1]),
    "clipped": lambda log: log[0]["grad_norm"] > FEATURES["clipped"]["max_grad_norm"],
    "dynamic": lambda log: log[0]["dynamic_sampling/discarded_groups"] > 0,
    "token budget": lambda log: log[0]["micro_batches/number"] > 2,
    "adaptive entropy": lambda log: log[0]["entropy_coef"] < log[1]["entropy_coef"],
    "routing replay": lambda log: 0 < log[0]["sampling/routing_difference"] < 1,
    "overlap": lambda log: staleness(log) == [0, 1],
    "two batches ahead": lambda log: staleness(log) == [0, 0.5],  # two in a step
}
# padding is to the longest row of a process
OF_PADDING = ("frac_rows_skipped", "micro_batches/number", "micro_batches/padding")
OF_PADDING += ("micro_batches/shared_tokens",)

Found = Any


def staleness(log: list[dict[str, float]]) -> list[float]:
    return [row["sampling/staleness"] for row in log if "loss" in row]


def place(placements: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.deepspeed] * name.startswith("zero"))
        for name in placements
    ]


def together(function: Callable[..., Found], placement: str, folder: Path, *words: str) -> Found:
    """Return what the first of two processes finds."""
    if placement.startswith("zero"):
        pytest.importorskip("deepspeed")
    return launch.run(function, *words, placement, str(folder))[0]


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Callable[..., Found]:
    """Return what one process finds, once for all placements."""
    kept: dict[tuple[Any, ...], Found] = {}

    def find(function: Callable[..., Found], *words: str) -> Found:
        key = (function, *words)
        if key not in kept:
            kept[key] = function(*words, "one", str(tmp_path_factory.mktemp("one")))
        return kept[key]

    return find


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for row, alone in zip(found, expected, strict=True):
        assert row == {n: pytest.approx(x, rel=2e-5, abs=1e-6) for n, x in alone.items()} | {
            name: row[name] for name in row if name.endswith(OF_PADDING)
        }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("placement", "feature"),
    [
        pytest.param(*placement.values, feature, marks=placement.marks)
        for placement in place(name for name in PLACEMENTS if name != "one")
        for feature in FEW.get(*placement.values, FEATURES)
        if (*placement.values, feature) not in BEYOND
    ],
)
def test_several_processes_are_one_process(placement, feature, alone, tmp_path):
    found = together(features.run, placement, tmp_path, feature)
    one = alone(features.run, feature)
    logged_steps = [row for row in one["log"] if "loss" in row]
    assert len(logged_steps) == (1 if feature in SELDOM else STEPS)
    assert {"reward", "grad_norm", "entropy"} <= set(logged_steps[0])
    assert SHOWN.get(feature, lambda log: True)(one["log"])
    assert_alike(found["log"], one["log"])
    atol = ATOL.get(feature, 2e-6)
    torch.testing.assert_close(found["weights"], one["weights"], rtol=0, atol=atol)
    assert found["held"] == pytest.approx(0.5 if placement in SHARDED else 1.0, abs=0.03)


@pytest.mark.parametrize("placement", place(SHARDED))
def test_generation(placement, alone, tmp_path):
    """Before, in and after training, gathered and not; a process without prompts takes part."""
    found = together(checks.generation, placement, tmp_path)
    for gathers, one in alone(checks.generation).items():
        seen = found[gathers]["seen"]
        assert seen == one["seen"] and seen[0] != seen[1] == seen[2]
        assert_alike(found[gathers]["log"], one["log"])


@pytest.mark.parametrize("placement", place(SHARDED))
def test_weights_are_streamed(placement, tmp_path):
    """One process sends, all gather; never much more than a parameter is in memory."""
    for found in together(checks.streamed, placement, tmp_path).values():
        assert_equal(found["sent"], found["weights"])
        # the gathered one and its parts; the thread that communicates may free the last ones late
        assert 0 < found["peak"] <= 4 * found["largest"] + 1024 < found["total"] / 2


@pytest.mark.parametrize("placement", place(["ddp", "fsdp2", "zero2", "zero3"]))
def test_a_resumed_run_is_the_straight_one(placement, tmp_path):
    whole = placement in ("ddp", "zero2")
    shards = "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    of = {"ddp": "optimizer.pt", "fsdp2": "pytorch_model_fsdp_0/__1_0.distcp"}
    for name, found in together(checks.checkpoints, placement, tmp_path).items():
        for key in ("resumed", "finished", "loaded"):
            assert_equal(found[key], found["straight"])
        straight, resumed = found["logs"]
        assert straight == resumed
        files = set(found["files"])
        assert {of.get(placement, shards), "SHA256SUMS", "process_state_1.pt"} <= files
        adapted = name in checks.ADAPTED
        weights = "adapter_model.safetensors" if adapted else "model.safetensors"
        assert (weights in files) == whole


@pytest.mark.parametrize("placement", place(["ddp", "fsdp2"]))
def test_groups_in_flight_stay_whole(placement, tmp_path):
    """Also further ones of dynamic sampling, of which one process may lack none."""
    for step in together(checks.in_flight, placement, tmp_path)["prompts"]:
        groups = [step[:4], step[4:]]
        assert [len(set(group)) for group in groups] == [1, 1] and len(step) == 8


@pytest.mark.parametrize("placement", place(["ddp", "fsdp2"]))
def test_a_process_that_is_interrupted_stops_all(placement, alone, tmp_path):
    found = together(checks.interrupted, placement, tmp_path)
    straight = alone(features.run, "dynamic")["weights"]
    torch.testing.assert_close(found["weights"], straight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("placement", place(SHARDED))
def test_a_policy_by_name(placement, alone, tmp_path):
    """It is loaded in shards where the placement can, its reference is copied from shards."""
    found, one = together(checks.loading, placement, tmp_path), alone(checks.loading)
    assert_alike(found["log"], one["log"])
    torch.testing.assert_close(found["weights"], one["weights"], rtol=0, atol=2e-6)
    assert found["held"] == (0.5 if placement == "zero3" else 1.0)
    if found["evaluated"] is not None:
        assert found["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)


@pytest.mark.parametrize("placement", place(["fsdp2", "zero2", "zero3"]))
def test_what_cannot_work_is_refused(placement, tmp_path):
    found = together(checks.refused, placement, tmp_path)
    assert "cast_lm_head_to_fp32: expected False" in found["fp32 head"]
    expected = "generation_batches_ahead: expected 0, or an engine with weights of its own"
    assert expected in found["overlap"]
    instead = {"fsdp2": "set modules_to_save=", "zero2": "nothing", "zero3": "use ZeRO-2"}
    assert instead[placement] in found["tokens"]
    if placement == "fsdp2":
        assert "cpu_ram_efficient_loading: expected False" in found["loading"]
    else:
        assert "evaluate: expected it during or after train" in found["evaluate"]


def test_what_one_process_finds_all_raise(tmp_path):
    every = launch.run(checks.found_by_one, "ddp", str(tmp_path))
    assert all("expected a folder without a run in it" in found["locked"] for found in every)
    assert all("checkpoint-2 has no process_state_0.pt" in found["part"] for found in every)


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


def test_each_process_replays_its_own_groups(tmp_path):
    for found in launch.run(checks.replayed, "ddp", str(tmp_path)):
        first, *rest = found["seen"]
        for groups in (first, *rest):  # whole ones, of one prompt each
            assert all(len({prompt for prompt, _ in group}) == 1 for group in groups)
        before = first
        for groups in rest:
            assert groups[-1] in before and not [x for x in groups[:-1] if x in before]
            before = before + groups


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


@pytest.mark.parametrize("placement", place(SHARDED))
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

SHARDS = "fsdp: expected processes that accelerate shards a model over"


@pytest.mark.parametrize(
    ("settings", "asked", "found", "message"),
    [
        ({"fsdp": True}, "no", PLAIN, SHARDS),
        ({}, "true", PLAIN, SHARDS),
        ({}, "no", TENSORS, "parallelism_config: expected data .*, got tp_size=2"),
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
