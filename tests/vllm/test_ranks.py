"""Several processes: each gets completions of its own prompts, by the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import make_tokenizer
from grpo_trainer.engines import policy_weights
from grpo_trainer.policy import placement_of
from tests.support import launch
from tests.support.placements import prepare, processes
from tests.support.trainer import lengths_reward
from tests.vllm.vllm_helpers import (
    CLOSE,
    TAKES_LORA,
    make_config,
    make_model,
    serving,
    worst_mismatch,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are processes on a CPU")
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SERVER = {"vllm_mode": "server"}
# placement and engine: one each, one together, or a server's
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "colocate": ("ddp", {}),
    "parallel": ("ddp", {"vllm_tensor_parallel_size": 2}),
    "sharded": ("fsdp2", {}),
    "overlap": ("ddp", SERVER | {"generation_batches_ahead": 1}),
    "in flight": ("ddp", SERVER | {"generation_batches_ahead": 1, "max_staleness": 3}),
    "two ahead": ("ddp", SERVER | {"generation_batches_ahead": 2}),
    "sharded, server": ("fsdp2", SERVER | {"beta": 0.05}),
    "sharded, overlap": ("fsdp2", SERVER | {"generation_batches_ahead": 1}),
    "parallel, adapter": ("ddp", {"vllm_tensor_parallel_size": 2, "lora": LORA}),
    "sharded, adapter": ("fsdp2", {"lora": LORA}),
    "sharded, server, adapter": ("fsdp2", SERVER | {"lora": LORA}),
    "overlap, adapter": ("ddp", SERVER | {"generation_batches_ahead": 1, "lora": LORA}),
}
NODES = ("sharded, server", "sharded, overlap", "sharded, server, adapter")


def train(placement: str, folder: str, tied: bool, changes: dict[str, Any]) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    lora = changes.pop("lora", None)
    args = make_config(
        folder,
        per_device_train_batch_size=8 // processes(),
        max_completion_length=4,
        **prepare(placement),
        **changes,
    )
    dataset = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(12)])
    model = make_model(tokenizer, tied=tied)
    trainer = GRPOTrainer(
        model, lengths_reward, args, dataset, processing_class=tokenizer,
        peft_config=LoraConfig(**lora) if lora else None,
    )  # fmt: skip
    trainer.train()
    assert trainer.rollouts.engine.takes_adapter == bool(lora)
    # as if a group were split over processes
    seen = trainer.rollouts.generate([[3, 4, 5]] * 4).token_ids
    weights = dict(policy_weights(trainer.model, placement_of(trainer.accelerator)))
    trainer.rollouts.close()
    logged = [row for row in trainer.state.log_history if "weight_update_bytes" in row]
    rows = [row for row in trainer.state.log_history if "sampling/staleness" in row]
    return {
        "seen": seen,
        "mismatch": worst_mismatch(trainer, 3),
        "weight": float(weights["lm_head.weight"].double().sum()),
        "placement": str(trainer.accelerator.distributed_type),
        "bytes": sorted({row["weight_update_bytes"] for row in logged}),
        "factors": 4 * factors_of(trainer.model) if lora else 0,
        "staleness": [row["sampling/staleness"] for row in rows],
    }


def factors_of(model) -> int:
    """Return the number of values that LoRA adds to ``model``, whose processes may share them."""
    return sum(
        LORA["r"] * (layer.in_features + layer.out_features)
        for layer in model.modules()
        if isinstance(layer, LoraLayer)
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    model = make_model(tokenizer, tied=False)
    with serving(tmp_path_factory.mktemp("server"), model, tokenizer, TAKES_LORA) as server:
        yield server


@pytest.fixture(scope="module")
def nodes() -> Iterator[launch.Ranks]:
    with launch.ranks(4, nodes=2) as group:
        yield group


@pytest.fixture
def _shared_memory() -> Iterator[None]:
    """Delete what ended ranks leave: vLLM gives it one name in all runs, and wants it to be new."""
    left = partial(Path("/dev/shm").glob, "-tp:*-cpushm_*")
    for path in left():
        path.unlink()
    yield
    for path in left():
        path.unlink()


@pytest.mark.usefixtures("_shared_memory")
@pytest.mark.parametrize("mode", MODES)
def test_gloo_ranks(tmp_path: Path, request, mode: str) -> None:
    """Train on two ranks, or on two nodes of two ranks each, and compare what came out."""
    placement, changes = MODES[mode]
    served = "vllm_mode" in changes
    if served:
        changes = changes | {"vllm_server_port": request.getfixturevalue("server").port}
    run = partial(train, placement, str(tmp_path / "out"), not served, changes)
    if mode in NODES:
        found = request.getfixturevalue("nodes").run(run)
    elif served:
        found = launch.run(run)
    else:  # an engine ends the group that it was in
        with launch.ranks(2) as group:
            found = group.run(run)
    seen = [one.pop("seen") for one in found]
    assert all(seen[0] != other for other in seen[1:])  # they draw different random numbers
    assert all(one == found[0] for one in found)
    ahead = changes.get("generation_batches_ahead", 0)
    assert (found[0]["mismatch"] < CLOSE) != bool(ahead)  # there completions are older
    if "max_staleness" in changes:  # weights may come before a completion's last tokens
        assert found[0]["staleness"][0] == 0 < max(found[0]["staleness"]) <= ahead
    else:
        assert found[0]["staleness"] == ([], [0, 1, 1], [0, 1, 2])[ahead]
    sent, factors = found[0]["bytes"], found[0]["factors"]
    assert len(sent) == 1 and (sent == [factors] if factors else sent[0] > 0)
    sharded = "FSDP" if placement == "fsdp2" else "MULTI_CPU"
    assert found[0]["placement"] == f"DistributedType.{sharded}"
