"""What is said where a tile does not fit into a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends import gpu_tiles
from grpo_kernels.backends.gpu_tiles import ROW_CONFIG, LinearConfig, RowConfig, aligned_config


@pytest.mark.parametrize("config", [ROW_CONFIG, aligned_config("sm_90")])
def test_a_tile_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, config: RowConfig | LinearConfig
) -> None:
    common = pytest.importorskip("grpo_kernels.backends.triton.common")
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_tiles, "_known_class", gpu_tiles._class_of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    too_much = common.OutOfResources(262144, 232448, "shared memory")
    with (
        pytest.raises(RuntimeError, match=r"out of resource: shared memory, .*: 232448") as caught,
        common.launching(config, SimpleNamespace(device=torch.device("cuda", 0))),
    ):
        raise too_much
    said = f"{config} of grpo_kernels/backends/gpu_tiles.py does not fit sm_90; `make gpu-tune`"
    assert said in str(caught.value)
