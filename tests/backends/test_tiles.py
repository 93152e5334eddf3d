"""Which tile sizes a launch gets, and whether the fused GEMM is used."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends import BACKENDS, chunk_rows
from grpo_kernels.backends.base import RowStats, StatsGradients, Tile, output_view
from grpo_kernels.backends.configs import linear as linear_tiles
from grpo_kernels.backends.configs import rows as tiles
from grpo_kernels.backends.configs.linear import (
    LINEAR_KERNELS,
    UNALIGNED_CONFIG,
    LinearCase,
    LinearConfig,
    default_config,
    width_class,
)
from grpo_kernels.backends.configs.rows import (
    DEFAULT_ROW_CONFIG,
    RowConfig,
    device_class,
    row_config,
    vocabulary_class,
)
from grpo_kernels.engine import Route, RunOptions, row_chunks
from grpo_kernels.engine.sweep import new_tile
from grpo_kernels.head import Head

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASE = LinearCase(
    device=GPU,
    dtype=BF16,
    logits=FP32,
    columns=151936,
    depth=2048,
    softcap=False,
)
TUNED = LinearConfig(128, 128, 64, 4, 3, 2, 16, 8, 1, 1)
KEY = ("sm_90", "linear", 32, "narrow", "medium")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake a GPU with one tuned entry of each kind; another class of heads is faster with tiles."""
    properties = SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(tiles.ROW_CONFIGS, ("sm_90", "stats", 16, "medium"), (8, 2))
    monkeypatch.setitem(tiles.CHUNK_ROWS, ("sm_90", 32, "medium"), 2048)
    monkeypatch.setitem(linear_tiles.LINEAR_CONFIGS, KEY, astuple(TUNED))
    monkeypatch.setitem(linear_tiles.LINEAR_CONFIGS, (*KEY[:3], "wide", "medium"), ())
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


def test_rows_of_a_chunk(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were tuned; others take 256 MiB, in blocks of a GEMM."""
    assert chunk_rows(151936, BF16, "fp32", GPU, None) == 2048
    assert chunk_rows(151936, BF16, "input", GPU, None) == 768
    assert chunk_rows(32000, BF16, "fp32", GPU, None) == 2048
    assert chunk_rows(1 << 20, BF16, "fp32", GPU, None) == 256
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # it can be asked all the same
    assert device_class(GPU) == "cuda"
    assert chunk_rows(151936, BF16, "fp32", GPU, None) == 256


def test_tiles_of_a_gpu_have_few_sizes_and_aligned_rows() -> None:
    route = Route(
        backend=BACKENDS["chunked"],
        options=RunOptions(),
        dtype=BF16,
        device=torch.device("meta"),
        columns=50257,
        tile_rows=4096,
        linear_stats=None,
    )
    assert row_chunks(5000, route) == [slice(0, 2560), slice(2560, 5000)]
    assert row_chunks(4096, route) == [slice(0, 4096)]
    sizes = {new_tile(route, height).shape[0] for height in range(1, 4097, 7)}
    assert sizes == {512 * n for n in range(1, 9)}
    tile = new_tile(route, 100)
    assert tile.shape == (512, 50257) and tile.stride() == (50272, 1)
    assert output_view(tile, BF16).stride(0) * BF16.itemsize % 128 == 0


def test_amd_devices_go_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_class(GPU) == "gfx942"


def test_a_wave_has_64_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    row_config.cache_clear()
    monkeypatch.setattr(tiles, "device_class", lambda device: "gfx942")
    config = row_config("stats", FP32, 151936, GPU)
    row_config.cache_clear()
    assert config.lanes(FP32) == 2 * DEFAULT_ROW_CONFIG.lanes(FP32)
    assert config.options == DEFAULT_ROW_CONFIG.options
    assert DEFAULT_ROW_CONFIG.on("sm_120") == DEFAULT_ROW_CONFIG == DEFAULT_ROW_CONFIG.on("gfx1100")


def test_classes_of_heads() -> None:
    sizes = {32000: "small", 128256: "medium", 151936: "medium", 256000: "large", 262144: "large"}
    assert {size: vocabulary_class(size) for size in sizes} == sizes
    assert [width_class(x) for x in (1, 896, 2560, 4096)] == ["narrow"] * 3 + ["wide"]


ROWS_KEY = ("sm_90", "stats", 16, "medium")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RowConfig(8, 2), f"tuned.py under {ROWS_KEY}; without this entry the default runs"),
        (TUNED, f"tuned.py under {KEY}; without this entry the default runs"),
        (DEFAULT_ROW_CONFIG, "no tuned tile of sm_90; `make gpu-tune` measures"),
    ],
)
def test_a_tile_that_does_not_fit_is_named(
    hopper: None, monkeypatch: pytest.MonkeyPatch, config: RowConfig | LinearConfig, said: str
) -> None:
    common = pytest.importorskip("grpo_kernels.backends.triton.common")
    monkeypatch.setattr(common, "on_device", lambda tensor: nullcontext())
    too_much = common.OutOfResources(262144, 232448, "shared memory")
    with (
        pytest.raises(RuntimeError, match=r"out of resource: shared memory, .*: 232448") as caught,
        common.launching(config, SimpleNamespace(device=GPU)),
    ):
        raise too_much
    assert str(config) in str(caught.value) and said in str(caught.value)


def test_every_launch_of_a_tile_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three row kernels, and the fused forward."""
    triton = pytest.importorskip("grpo_kernels.backends.triton")
    from triton.runtime.errors import OutOfResources

    def refuse(**_: object) -> None:
        raise OutOfResources(262144, 232448, "shared memory")

    kernels = {"row_stats": "_row_stats_kernel", "dlogits": "_dlogits_kernel"}
    kernels |= {"row_loss": "_row_loss_kernel", "linear_launch": "linear_stats_kernel"}
    for name, kernel in kernels.items():
        module = importlib.import_module(f"{triton.__name__}.{name}")
        monkeypatch.setattr(module, kernel, defaultdict(lambda: refuse))
    x, head = torch.randn(3, 8).bfloat16(), Head(torch.randn(9, 8).bfloat16())
    target = torch.arange(3)
    tile = Tile(torch.randn(3, 9), target, head.transform)
    stats = RowStats(*(torch.zeros(3) for _ in range(3)))
    function = triton.RowFunction(device_function=None, has_dentropy=False)
    outer = StatsGradients(torch.ones(3), None)
    for call in (
        lambda: triton.TRITON_ROWS.stats(tile, False),
        lambda: triton.TRITON_ROWS.dlogits_(tile, stats, outer, FP32),
        lambda: triton.row_loss_(tile, function, [None] * triton.MAX_VALUES, FP32),
        lambda: triton.linear_stats(x, head, target, "fp32", False),
    ):
        with pytest.raises(RuntimeError, match=r"shared memory.*Config\(.*make gpu-tune"):
            call()


# --- of the fused GEMM


OTHERS = {"columns": 32000, "softcap": True, "logits": BF16, "device": CPU}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tuned_tile_of_the_fused_gemm_is_used_for_its_kind_only(name: str, hopper: None) -> None:
    assert CASE.config == TUNED and CASE.pays
    assert replace(CASE, dtype=FP16, depth=1536, columns=128256).config == TUNED
    other = replace(CASE, **{name: OTHERS[name]})
    assert other.config == default_config("cpu" if name == "device" else "sm_90") and other.pays


def test_where_tiles_of_logits_are_faster(hopper: None) -> None:
    wide = replace(CASE, depth=4096)
    assert not wide.pays
    assert wide.config == default_config("sm_90")  # for who calls the kernel all the same
    assert not replace(CASE, dtype=FP32).pays


def test_tiles_of_one_subtile_cover_the_same_split() -> None:
    config = default_config("sm_90")
    one = config.of_one_subtile()
    assert one.subtiles == 1 and one.split_columns == config.split_columns
    assert one.block_v == config.block_v // config.subtiles
    assert one.of_one_subtile() == one


# shared memory of a block, KiB
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227}
SHARED |= {"sm_110": 227, "sm_120": 99, "sm_121": 99, "gfx942": 64}


@pytest.mark.parametrize("device", SHARED)
def test_the_tile_of_a_named_device_fits_into_its_shared_memory(device: str) -> None:
    config = default_config(device)
    operands = (config.block_t + config.block_v) * config.block_d * BF16.itemsize
    assert operands * config.num_stages <= SHARED[device] << 10
    assert config != default_config("any other")


def assert_powers_of_two(*sizes: int) -> None:
    assert all(size > 0 and size & (size - 1) == 0 for size in sizes)


def test_configs_are_powers_of_two() -> None:
    tuned = [RowConfig(*values) for values in tiles.ROW_CONFIGS.values()]
    for config in (DEFAULT_ROW_CONFIG, *tuned):
        assert_powers_of_two(config.num_warps, config.depth, config.columns(FP32))
    devices = (*SHARED, "any other")
    tuned = [LinearConfig(*values) for values in linear_tiles.LINEAR_CONFIGS.values() if values]
    for config in (*map(default_config, devices), UNALIGNED_CONFIG, TUNED, *tuned):
        assert_powers_of_two(config.block_t, config.block_v, config.block_d)
        assert_powers_of_two(config.num_warps, config.subtiles, config.tiles)
        assert config.subtiles in (1, 2) and {config.descriptors, config.flat} <= {0, 1}
        assert {config.persistent, config.specialized} <= {0, 1}


def test_keys_of_the_tables() -> None:
    assert all(len(key) == 4 for key in tiles.ROW_CONFIGS)
    assert all(len(key) == 5 for key in linear_tiles.LINEAR_CONFIGS)
    for key in (*tiles.ROW_CONFIGS, *linear_tiles.LINEAR_CONFIGS):
        _, kernel, bits, *width, vocabulary = key
        assert kernel in (LINEAR_KERNELS if width else tiles.ROW_KERNELS) and bits in (16, 32)
        assert {*width} <= {"narrow", "wide"} and vocabulary in ("small", "medium", "large")
