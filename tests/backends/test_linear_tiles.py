"""Which tile the fused GEMM gets, and whether it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends.configs import linear as linear_tiles
from grpo_kernels.backends.configs.linear import (
    LINEAR_KERNELS,
    UNALIGNED_CONFIG,
    LinearCase,
    LinearConfig,
    default_config,
    width_class,
)

CASE = LinearCase(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    logits=torch.float32,
    columns=151936,
    depth=2048,
    softcap=False,
)
TUNED = LinearConfig(128, 128, 64, 4, 3, 2, 16, 8, 1, 1)
KEY = ("sm_90", "linear", 32, "narrow", "medium")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake a GPU on which one class of heads was tuned, and another is faster with tiles."""
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(linear_tiles.LINEAR_CONFIGS, KEY, astuple(TUNED))
    monkeypatch.setitem(linear_tiles.LINEAR_CONFIGS, (*KEY[:3], "wide", "medium"), ())


OTHERS = {
    "columns": 32000,
    "softcap": True,
    "logits": torch.bfloat16,
    "device": torch.device("cpu"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tuned_entry_is_used_for_its_kind_only(name: str, hopper: None) -> None:
    assert CASE.config == TUNED and CASE.pays
    assert replace(CASE, dtype=torch.float16, depth=1536, columns=128256).config == TUNED
    other = replace(CASE, **{name: OTHERS[name]})
    assert other.config == default_config("cpu" if name == "device" else "sm_90") and other.pays


def test_where_tiles_of_logits_are_faster(hopper: None) -> None:
    wide = replace(CASE, depth=4096)
    assert not wide.pays
    assert wide.config == default_config("sm_90")  # for who calls the kernel all the same
    assert not replace(CASE, dtype=torch.float32).pays


def test_tiles_of_one_subtile_cover_the_same_split() -> None:
    config = default_config("sm_90")
    one = config.of_one_subtile()
    assert one.subtiles == 1 and one.split_columns == config.split_columns
    assert one.block_v == config.block_v // config.subtiles
    assert one.of_one_subtile() == one


def test_width_classes() -> None:
    assert [width_class(x) for x in (1, 896, 2560, 4096)] == ["narrow"] * 3 + ["wide"]


def test_configs_are_powers_of_two() -> None:
    devices = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "any other")
    tuned = [LinearConfig(*values) for values in linear_tiles.LINEAR_CONFIGS.values() if values]
    for config in (*map(default_config, devices), UNALIGNED_CONFIG, TUNED, *tuned):
        for name in ("block_t", "block_v", "block_d", "num_warps", "subtiles", "tiles"):
            size = getattr(config, name)
            assert size > 0 and size & (size - 1) == 0
        assert config.subtiles in (1, 2) and {config.descriptors, config.flat} <= {0, 1}
    for _, kernel, bits, width, vocabulary in linear_tiles.LINEAR_CONFIGS:
        assert kernel in LINEAR_KERNELS and bits in (16, 32) and width in ("narrow", "wide")
        assert vocabulary in ("small", "medium", "large")
