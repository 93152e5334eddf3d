"""Optimizers of other libraries over two processes: replicas, shards, states in main memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import launch
from tests.trainer.processes import optimizers
from tests.trainer.processes.test_processes import assert_equal, place, together

pytestmark = pytest.mark.slow

PLAIN = ["Tensor of torch.float32"]


def distance(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(sum((found[name].float() - other[name].float()).square().sum() for name in found))


def run(way: str, placement: str, folder: Any) -> dict[str, Any]:
    return together(optimizers.run, placement, folder / way, way)


@pytest.mark.parametrize("way", ["bitsandbytes", "torchao", "rounded", "rounded, plain states"])
def test_replicas_stay_alike(way, tmp_path):
    first, second = launch.run(optimizers.run, way, "ddp", str(tmp_path))
    pairs = list(zip(first["own"], second["own"], strict=True))
    assert all(torch.equal(own, other) for own, other in pairs)
    assert_equal(first["resumed"], first["weights"])
    exact = run("adamw, bf16" if way.startswith("rounded") else "adamw", "ddp", tmp_path)
    start = optimizers.plain().state_dict()
    assert 0 < distance(first["weights"], exact["weights"]) < distance(first["weights"], start) / 4


@pytest.mark.parametrize(
    ("placement", "way", "states"),
    [
        pytest.param("fsdp2", "torchao", ["OptimState8bit of torch.float32", *PLAIN]),
        pytest.param("fsdp2", "rounded, plain states", ["Tensor of torch.bfloat16"]),
        *(
            pytest.param(
                zero, "bitsandbytes", [*PLAIN, "Tensor of torch.uint8"], marks=pytest.mark.deepspeed
            )
            for zero in ("zero2", "zero3")
        ),
    ],
)
def test_shards(placement, way, states, tmp_path):
    found = run(way, placement, tmp_path)
    exact = run("adamw, bf16" if way.startswith("rounded") else "adamw", placement, tmp_path)
    start = optimizers.plain().state_dict()
    assert found["states"] == states
    assert_equal(found["resumed"], found["weights"])
    assert 0 < distance(found["weights"], exact["weights"]) < distance(found["weights"], start) / 4


@pytest.mark.parametrize("placement", place(["fsdp2", "zero2", "zero3"]))
def test_states_in_main_memory(placement, tmp_path):
    """Without a GPU all is there: what is tested is that the settings reach the libraries."""
    found, exact = (run(way, placement, tmp_path) for way in ("in main memory", "adamw"))
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, exact["weights"][name], rtol=0, atol=1e-5)
        # DeepSpeed's optimizer multiplies powers of beta up, which a resumed run computes anew
        atol = 0 if placement == "fsdp2" else 1e-6
        torch.testing.assert_close(found["resumed"][name], weight, rtol=0, atol=atol)
    assert found["states"] == PLAIN and found["devices"] == ["cpu"]


@pytest.mark.parametrize("placement", place(["fsdp2", "zero2"]))
def test_weights_that_placing_casts(placement, tmp_path):
    """A checkpoint says what was loaded, so that a run goes on that loads the same."""
    found = run("mixed precision", placement, tmp_path)
    kinds = {weight.dtype for weight in found["weights"].values()}
    assert kinds == {torch.float32 if placement == "fsdp2" else torch.bfloat16}
    assert_equal(found["resumed"], found["weights"])


@pytest.mark.parametrize("placement", place(["fsdp2", "zero2"]))
def test_what_cannot_be_updated(placement, tmp_path):
    found = together(optimizers.refused, placement, tmp_path)
    if placement == "fsdp2":
        said = "optim: expected an optimizer of torch or torchao (adamw_torch_8bit) under FSDP2"
        assert said in found["bitsandbytes"] and said in found["adafactor"]
        assert found["torchao"] == "nothing" == found["rounded"]
        assert "optim: expected float32 weights" in found["torchao, bf16"]
        assert (
            "dtype=bfloat16), which it rounds; got float32" in found["rounded in mixed precision"]
        )
    else:
        assert found["bitsandbytes"] == "nothing" == found["adafactor"]
        said = "optim: expected an optimizer of torch or bitsandbytes (adamw_8bit) under DeepSpeed"
        assert said in found["torchao"]
        assert "bf16_stochastic_round: expected False under DeepSpeed" in found["rounded"]
