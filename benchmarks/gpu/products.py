"""GEMMs of a step in every form, a copy and the kernel that scales gradients, one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.timed import Cost, Stopwatch, rates
from grpo_kernels.backends.base import output_view
from grpo_kernels.backends.triton import scaled_
from grpo_kernels.head import Head, accumulate, matmul_precision, project

_COLUMNS, _ODD, _PADDED = 151936, 151665, 151680
# (C, V, D), the commonest first; then a vocabulary that is odd, alone and in rows that are padded
_SHAPES = [(rows, _COLUMNS, depth) for depth in (2048, 4096, 896) for rows in (4096, 8192)]
_SMALL_SHAPES = [(16, 257, 32)]
_COPIED = {False: 4 << 30, True: 1 << 16}  # bytes
_ROUNDS = 5
_BF16 = torch.bfloat16


def products(notes: Notes, small: bool) -> None:
    """Measure the copy, then every form for each shape."""
    watch = Stopwatch(notes.device, 1 if small else _ROUNDS)
    copied = _COPIED[small]
    odd = (16, 255, 256, 32) if small else (8192, _ODD, _PADDED, 2048)
    cases: list[tuple[str, Callable[[], object]]] = [("copy", partial(_copy, notes, watch, copied))]
    for shape in _SMALL_SHAPES if small else _SHAPES:
        cases.append((f"products {shape}", partial(_forms, notes, watch, *shape)))
    cases.insert(3, (f"odd {odd}", partial(_odd, notes, watch, *odd)))
    with matmul_precision(notes.device, "fp32"):
        notes.every(cases)


def _copy(notes: Notes, watch: Stopwatch, copied: int) -> None:
    source = torch.empty(copied, dtype=torch.int8, device=notes.device).random_()
    out = torch.empty_like(source)
    found = rates(watch.seconds(lambda: out.copy_(source)), Cost(bytes=2 * copied))
    notes.number("copy", **found)
    notes.headline(f"copy: {found['gb_per_s']:.0f} GB/s")


def _normal(notes: Notes, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=_BF16, device=notes.device).normal_()


def _forms(notes: Notes, watch: Stopwatch, rows: int, columns: int, depth: int) -> None:
    hidden, weight = _normal(notes, rows, depth), _normal(notes, columns, depth)
    head, empty = Head(weight), partial(torch.empty, device=notes.device)
    tile, narrow = empty(rows, columns), empty(rows, columns, dtype=_BF16)
    project(hidden, head, narrow)
    strided = output_view(tile, _BF16)
    wide, short = empty(columns, depth), empty(columns, depth, dtype=_BF16)
    dhidden, scale = empty(rows, depth), torch.full((), 0.5, device=notes.device)

    def narrowed() -> None:
        strided.copy_(narrow)

    operations, size = 2.0 * rows * columns * depth, float(columns * depth)
    product = Cost(operations=operations)

    def beyond(extra: float) -> Cost:
        return Cost(operations=operations, bytes=extra)

    forms: dict[str, tuple[Cost, Callable[[], object], Callable[[], object]]] = {
        "logits bf16": (product, lambda: project(hidden, head, narrow), _nothing),
        "logits fp32": (
            beyond(2.0 * rows * columns), lambda: project(hidden, head, tile), _nothing,
        ),
        "dhidden": (product, lambda: accumulate(dhidden, narrow, weight, True), _nothing),
        "dh strided": (product, lambda: accumulate(dhidden, strided, weight, True), narrowed),
        "dweight": (product, lambda: accumulate(short, narrow.t(), hidden, True), _nothing),
        "dw fp32": (
            beyond(2 * size), lambda: accumulate(wide, narrow.t(), hidden, True), _nothing,
        ),
        "dw fp32 strided": (
            beyond(2 * size), lambda: accumulate(wide, strided.t(), hidden, True), narrowed,
        ),
        "dw fp32 added": (
            beyond(6 * size), lambda: accumulate(wide, narrow.t(), hidden, False), _nothing,
        ),
        "scale fp32 to bf16": (
            Cost(bytes=6 * size), lambda: scaled_(wide, scale, _BF16), _nothing,
        ),
        "scale bf16": (
            Cost(bytes=4 * size), lambda: scaled_(short, scale, _BF16), _nothing,
        ),
    }  # fmt: skip
    found = _measured(notes, watch, f"C {rows} V {columns} D {depth}", forms)
    per_product = {
        name: found[name] / found["logits bf16"] for name in found if not name.startswith("scale")
    }
    notes.headline(
        f"C {rows} D {depth}: logits bf16 {operations / found['logits bf16'] / 1e12:.0f} TFLOP/s; "
        + ", ".join(f"{name} x{ratio:.2f}" for name, ratio in list(per_product.items())[1:])
    )


def _odd(notes: Notes, watch: Stopwatch, rows: int, columns: int, padded: int, depth: int) -> None:
    """Measure an odd vocabulary in rows as long as it is, and in rows that are padded."""
    hidden, weight = _normal(notes, rows, depth), _normal(notes, columns, depth)
    head, product = Head(weight), Cost(operations=2.0 * rows * columns * depth)
    dhidden = torch.empty(rows, depth, device=notes.device)
    dweight = torch.empty(columns, depth, dtype=_BF16, device=notes.device)
    seconds = {}
    for name, width in (("odd", columns), ("padded", padded)):
        tile = torch.empty(rows, width, device=notes.device)[:, :columns]
        strided = output_view(tile, _BF16)
        strided.normal_()
        forms: dict[str, tuple[Cost, Callable[[], object], Callable[[], object]]] = {
            "dhidden": (product, partial(accumulate, dhidden, strided, weight, True), _nothing),
            "dweight": (product, partial(accumulate, dweight, strided.t(), hidden, True), _nothing),
            "logits fp32": (product, partial(project, hidden, head, tile), _nothing),
        }
        what = f"{name}, C {rows} V {columns} D {depth}"
        seconds[name] = sum(_measured(notes, watch, what, forms).values())
    ratio = seconds["odd"] / seconds["padded"]
    notes.headline(f"odd V {columns}: three products take x{ratio:.2f} of those in padded rows")


def _nothing() -> None: ...


def _measured(
    notes: Notes,
    watch: Stopwatch,
    what: str,
    forms: dict[str, tuple[Cost, Callable[[], object], Callable[[], object]]],
) -> dict[str, float]:
    """Return the seconds of each form."""
    found = {}
    for name, (cost, call, prepare) in forms.items():
        found[name] = watch.seconds(call, prepare)
        notes.number(f"{name}, {what}", **rates(found[name], cost))
    return found
