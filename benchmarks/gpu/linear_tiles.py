"""Candidates for the forward without gradient: the fused GEMM's tiles, or tiles of logits.

Needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.candidates import Candidate, difference
from benchmarks.shapes import Model
from grpo_kernels.backends import BACKENDS, RowStats
from grpo_kernels.backends.configs.linear import SPECIALIZING, LinearConfig, default_config
from grpo_kernels.backends.configs.rows import bits, device_class, gpu_chunk_rows
from grpo_kernels.backends.triton.linear_launch import linear_stats
from grpo_kernels.engine import Route, Rows, RunOptions, row_chunks, sweep
from grpo_kernels.head import Head, Transform, logits_dtype

# rows, columns, depth, warps, stages, subtiles; each compiles without spills where it is tried
_ENGINE_SHAPES = (
    (128, 256, 64, 8, 4, 2),
    (128, 128, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 2),
    (128, 128, 64, 8, 4, 2),
)
_POINTER_SHAPES = (
    (128, 128, 32, 8, 3, 2),
    (128, 128, 64, 8, 3, 2),
    (128, 64, 64, 4, 3, 2),
)
# How the vocabulary is shared out, of the first candidate.
_SHARES = ({"tiles": 4}, {"tiles": 16}, {"group": 8}, {"group": 32})
TILES_OF_LOGITS = ()  # the value of the library's GEMM with row kernels
# of logp, entropy and lse; a sum of another order may round a 16-bit logit the other way
_TOLERANCES = {32: 1e-5, 16: 1e-2}
_SLICE = slice(5, 133)


def linear_configs(device_class: str) -> list[LinearConfig]:
    """Return the configs to try, the default first."""
    default = default_config(device_class)
    shapes = _ENGINE_SHAPES if default.descriptors else _POINTER_SHAPES
    keys = ("block_t", "block_v", "block_d", "num_warps", "num_stages", "subtiles")
    found = [default]
    for shape in shapes:
        config = replace(default, **dict(zip(keys, shape, strict=True)))
        found.append(replace(config, tiles=max(1, default.split_columns // config.block_v)))
    if device_class == "sm_90":  # elsewhere the flat loop spills
        found += [replace(config, flat=1) for config in found]
    found += [replace(default, **share) for share in _SHARES]
    return list(dict.fromkeys([*found, *scheduled_configs(device_class)]))


def scheduled_configs(device_class: str) -> list[LinearConfig]:
    """Return the default tile with other ways of sharing out programs and warps."""
    flat, specialized = device_class == "sm_90", device_class in SPECIALIZING
    ways: list[dict[str, int]] = [{"persistent": 1}]
    ways += [{"flat": 1}, {"flat": 1, "persistent": 1}] if flat else []
    ways += [{"specialized": 1}, {"specialized": 1, "persistent": 1}] if specialized else []
    return [replace(default_config(device_class), **way) for way in ways]


def candidates(
    model: Model, rows: int, precision: str, device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """Return every tile of the fused GEMM, and the library's GEMM, on logits of deviation 2."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.empty(rows, model.hidden, dtype=dtype, device=device)
    weight = torch.empty(model.vocabulary, model.hidden, dtype=dtype, device=device)
    hidden.normal_(generator=generator)
    weight.normal_(std=2 / model.hidden**0.5, generator=generator)
    target = torch.randint(model.vocabulary, (rows,), generator=generator, device=device)
    head = Head(weight, None, Transform(softcap=model.softcap))

    def fused(config: LinearConfig, part: slice = slice(None)) -> RowStats:
        return linear_stats(hidden[part], head, target[part], precision, False, config)

    def by_tiles() -> RowStats:
        return _by_tiles(Rows(hidden=hidden, head=head, target=target), precision)

    tolerance = _TOLERANCES[bits(dtype) if precision == "input" else 32]
    want = _outputs(by_tiles())

    def check(run: Callable[[], RowStats]) -> str | None:
        return difference(_outputs(run()), want, tolerance)

    def check_fused(config: LinearConfig) -> str | None:
        whole, part = fused(config), fused(config, _SLICE)
        if not all(torch.equal(a[_SLICE], b) for a, b in zip(whole[:3], part[:3], strict=True)):
            return "a row's bits depend on its batch"
        return check(lambda: whole)

    return [
        *(
            Candidate(
                value=astuple(config),
                check=partial(check_fused, config),
                run=partial(fused, config),
            )
            for config in linear_configs(device_class(device))
        ),
        Candidate(value=TILES_OF_LOGITS, check=partial(check, by_tiles), run=by_tiles),
    ]


def _outputs(found: RowStats) -> dict[str, Tensor]:
    return {"logp": found.logp, "entropy": found.entropy, "lse": found.lse}


def _by_tiles(rows: Rows, precision: str) -> RowStats:
    logits, columns = logits_dtype(rows.hidden.dtype, precision), len(rows.head.weight)
    route = Route(
        backend=BACKENDS["triton"],
        options=RunOptions(precision=precision),
        dtype=rows.hidden.dtype,
        device=rows.hidden.device,
        columns=columns,
        tile_rows=gpu_chunk_rows(logits, columns, rows.hidden.device),
        has_tile=True,
    )
    return sweep(rows, route, row_chunks(rows.count, route))[0]
