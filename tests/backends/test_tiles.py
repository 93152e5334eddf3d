"""What is said where a tile does not fit into a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends.configs import linear, rows
from grpo_kernels.backends.configs.linear import LinearConfig
from grpo_kernels.backends.configs.rows import DEFAULT_ROW_CONFIG, RowConfig

TUNED = LinearConfig(128, 128, 64, 4, 3, 2, 16, 8, 1, 1)
KEY, ROWS_KEY = ("sm_90", "linear", 32, "narrow", "medium"), ("sm_90", "stats", 16, "medium")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RowConfig(8, 2), f"tuned.py under {ROWS_KEY}; without this entry the default runs"),
        (TUNED, f"tuned.py under {KEY}; without this entry the default runs"),
        (DEFAULT_ROW_CONFIG, "no tuned tile of sm_90; `make gpu-tune` measures"),
    ],
)
def test_a_tile_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, config: RowConfig | LinearConfig, said: str
) -> None:
    common = pytest.importorskip("grpo_kernels.backends.triton.common")
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(rows.ROW_CONFIGS, ROWS_KEY, (8, 2))
    monkeypatch.setitem(linear.LINEAR_CONFIGS, KEY, astuple(TUNED))
    monkeypatch.setattr(common, "on_device", lambda tensor: nullcontext())
    too_much = common.OutOfResources(262144, 232448, "shared memory")
    with (
        pytest.raises(RuntimeError, match=r"out of resource: shared memory, .*: 232448") as caught,
        common.launching(config, SimpleNamespace(device=torch.device("cuda", 0))),
    ):
        raise too_much
    assert str(config) in str(caught.value) and said in str(caught.value)
