"""Which tile sizes a launch gets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends import chunk_rows
from grpo_kernels.backends.configs import rows as tiles
from grpo_kernels.backends.configs.rows import (
    DEFAULT_CHUNK_ROWS,
    DEFAULT_ROW_CONFIG,
    RowConfig,
    device_class,
    row_config,
    vocabulary_class,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake a GPU with one tuned entry of each kind."""
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(tiles.ROW_CONFIGS, ("sm_90", "stats", 16, "medium"), (8, 2))
    monkeypatch.setitem(tiles.CHUNK_ROWS, ("sm_90", 32, "medium"), 2048)
    row_config.cache_clear()
    yield
    row_config.cache_clear()


def test_a_tuned_entry_is_used_for_its_kind_only(hopper: None) -> None:
    assert row_config("stats", BF16, 151936, GPU) == RowConfig(8, 2)
    assert row_config("stats", FP16, 128256, GPU) == RowConfig(8, 2)
    assert row_config("stats", FP32, 151936, GPU) == DEFAULT_ROW_CONFIG
    assert row_config("stats", BF16, 32000, GPU) == DEFAULT_ROW_CONFIG
    assert row_config("dlogits", BF16, 151936, GPU) == DEFAULT_ROW_CONFIG
    assert row_config("stats", BF16, 151936, CPU) == DEFAULT_ROW_CONFIG


def test_rows_of_a_chunk(hopper: None) -> None:
    assert chunk_rows(151936, BF16, "fp32", GPU, None) == 2048
    assert chunk_rows(151936, BF16, "input", GPU, None) == DEFAULT_CHUNK_ROWS
    assert chunk_rows(256000, BF16, "fp32", GPU, None) == DEFAULT_CHUNK_ROWS


def test_a_gpu_can_be_asked_about_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_class(GPU) == "cuda"
    assert chunk_rows(151936, BF16, "fp32", GPU, None) == DEFAULT_CHUNK_ROWS


def test_amd_devices_go_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_class(GPU) == "gfx942"


def test_vocabulary_classes() -> None:
    sizes = {32000: "small", 128256: "medium", 151936: "medium", 256000: "large", 262144: "large"}
    assert {size: vocabulary_class(size) for size in sizes} == sizes


def test_tiles_are_powers_of_two() -> None:
    tuned = [RowConfig(*value) for value in tiles.ROW_CONFIGS.values()]
    for config in [DEFAULT_ROW_CONFIG, *tuned]:
        for size in (config.num_warps, config.depth, config.columns(FP32)):
            assert size > 0 and size & (size - 1) == 0
    for (_, kernel, bits, vocabulary), _ in tiles.ROW_CONFIGS.items():
        assert kernel in tiles.ROW_KERNELS and bits in (16, 32)
        assert vocabulary in ("small", "medium", "large")
