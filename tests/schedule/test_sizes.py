"""Cases of ``tests/net`` at the sizes of large models, and where the host reads no values."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import grpo_kernels.batch.host as host
from tests.conftest import DEVICES
from tests.net.cases import Case
from tests.net.checks import check
from tests.net.test_net import ON_CPUS, assert_none_fails

LONG = 9000  # tokens, more than twice what a tile takes below
WHOLE_SEQUENCES = (
    ("gspo", {}),
    ("luspo", {}),
    ("gmpo", {}),
    ("vespo", {"rollout_correction_mode": "token_truncate"}),
    ("dapo", {"rollout_correction_mode": "sequence_truncate", "rollout_correction_max": 1.1}),
)


@pytest.mark.usefixtures("narrow_slices")
def test_a_backward_in_slices_of_the_vocabulary() -> None:
    assert_none_fails(100, 50, ON_CPUS)


def test_tiles_whose_rows_are_longer_than_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where rows start at multiples of 128 bytes."""
    for name in ("chunked_loop", "gradients"):
        place = sys.modules[f"grpo_kernels.engine.{name}"]
        monkeypatch.setattr(place, "leading_dim", lambda columns, dtype, device: columns + 11)
    assert_none_fails(101, 50, ON_CPUS)


def test_a_host_that_would_have_to_wait_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where no row without a gradient is left out after the forward."""
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    assert_none_fails(102, 60, ON_CPUS)


@pytest.mark.parametrize("loss_type,settings", WHOLE_SEQUENCES)
@pytest.mark.parametrize("tile_rows,schedule", [(4096, "auto"), (LONG + 100, "one_pass")])
def test_a_sequence_beside_its_tile(
    loss_type: str, settings: dict, tile_rows: int, schedule: str
) -> None:
    case = Case(
        loss_type=loss_type,
        settings={"beta": 0.04, **settings},
        lengths=(5, LONG, 0, 1),
        rollout="given",
        packed=True,
        vocab=11,
        tile_rows=tile_rows,
        schedule=schedule,
    )
    check(case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "backend,dtype,schedule,vocab",  # Gemma 3 1B, an odd one, 4B
    [
        ("auto", "bfloat16", "one_pass", 262_145),
        ("auto", "float32", "two_pass", 262_208),
        ("chunked", "float16", "two_pass", 262_144),
    ],
)
def test_a_large_vocabulary(
    backend: str, dtype: str, schedule: str, vocab: int, device: str
) -> None:
    """In two chunks."""
    of_head = dict(vocab=vocab, depth=8, trained="weight", tile_rows=4)
    check(Case(dtype=dtype, backend=backend, schedule=schedule, device=device, **of_head))


@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
@pytest.mark.parametrize(
    "part",
    ({}, {"lora": 3}, {"sampling_mask": True}, {"main_grad": True}, {"tile_rows": 2}),
    ids=str,
)
def test_fp16_gradients_of_a_huge_ratio(part: dict, schedule: str) -> None:
    """Those of the logits would be infinite in fp16; the scale falls between two tiles."""
    schedule = "auto" if "tile_rows" in part else schedule
    case = Case(dtype="float16", drift="huge", lengths=(17, 9), advantages="token", **part)
    check(replace(case, schedule=schedule, activation_bytes=0))
