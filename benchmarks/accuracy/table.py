"""Errors on a policy's distributions as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import text
from benchmarks.accuracy.derive import (
    BANDS,
    AccuracyFigures,
    Spread,
    accuracy_figures,
    is_of_gradients,
    shares,
)
from benchmarks.derive import QUOTED
from benchmarks.load import AccuracyTable
from benchmarks.shapes import DTYPES, MODELS
from benchmarks.table import with_missing
from benchmarks.work import WORKS

Column = tuple[str, list[str]]  # a title, and a cell for each row

_GRADIENT_LEGEND = (
    "A loss on the same kind of tokens, off-policy, so that some are clipped. loss: absolute "
    "error; dhidden and dweight: norm of the difference over the norm. Of a row of dhidden, where "
    "it has a gradient, the same by the probability p of its token: a row at p near 1 is a small "
    "difference of large terms, which rounded logits get wrong. Gradients are returned in the "
    "dtype of the inputs, and nobody is more exact than that."
)
_VALUE_LEGEND = (
    "Against fp64 of the same inputs, on tokens drawn from the distributions themselves. logp: "
    "absolute errors of the log-probabilities, by the probability p of the token. Ratio noise: "
    "|exp(logp - exact) - 1|, by how much an importance ratio is off whose other side is exact; "
    "on-policy it ought to be 1. H: absolute errors of the entropy."
)


def legend(tables: Sequence[AccuracyTable]) -> str:
    """Of the kinds of tables that are there."""
    kinds = {is_of_gradients(table) for table in tables}
    texts = {False: _VALUE_LEGEND, True: _GRADIENT_LEGEND}
    return "\n\n".join(text for kind, text in texts.items() if kind in kinds)


def in_order(tables: Sequence[AccuracyTable]) -> list[AccuracyTable]:
    """Values first, then as the models and dtypes are listed, the rounded dtype first."""
    models, dtypes = list(MODELS), list(DTYPES)[::-1]
    return sorted(
        tables,
        key=lambda x: (
            is_of_gradients(x), models.index(x.model), x.tokens, dtypes.index(x.dtype),
        ),
    )  # fmt: skip


def caption(table: AccuracyTable) -> str:
    """What the distributions are like."""
    found = shares(table)
    bands = ", ".join(f"{100 * share:.0f} % {name}" for name, share in found.bands.items())
    softcap = f", softcap {table.softcap:g}" if table.softcap is not None else ""
    said = (
        f"{table.model} (D = {table.hidden}, V = {table.vocabulary}{softcap}), {table.dtype}; "
        f"T = {table.tokens} tokens: {bands}; the rarest {text.error(found.rarest)}."
    )
    if found.entropy is None:
        return f"{WORKS[table.work].title}. {said}"
    return (
        f"{said} Entropies: median {text.digits(found.entropy.median, 2)}, nine tenths below "
        f"{text.digits(found.high_entropy, 2)}, at most {text.digits(found.entropy.maximum, 2)} "
        f"nats."
    )


def accuracy_table(table: AccuracyTable) -> str:
    """One line per provider that gave values or failed, then who gave none, and why."""
    rows = list(accuracy_figures(table).values())
    measured = _gradients(rows) if is_of_gradients(table) else _values(rows)
    for index, x in enumerate(rows):
        if x.row.failure:
            measured[0][1][index] = f"FAILED: {x.row.failure}"
    header = ["", *(title for title, _ in measured)]
    columns = [[_name(x) for x in rows], *(cells for _, cells in measured)]
    return with_missing(text.markdown_table(header, zip(*columns, strict=True)), table.rows)


def _values(rows: Sequence[AccuracyFigures]) -> list[Column]:
    columns = _by_band("logp", [x.logprobs for x in rows])
    columns.append(("ratio noise: mean", _ranked([x.noise for x in rows])))
    columns.append(("max", _ranked([x.worst_noise for x in rows])))
    columns += _spread("H", [x.entropy for x in rows])
    for index, x in enumerate(rows):
        if x.entropy is None and x.row.failure is None:
            columns[-2][1][index] = "none"
    return columns


def _gradients(rows: Sequence[AccuracyFigures]) -> list[Column]:
    columns: list[Column] = [
        (name, _ranked([x.row.errors.get(name) for x in rows]))
        for name in ("loss", "dhidden", "dweight")
    ]
    return columns + _by_band("rows of dhidden", [x.gradients for x in rows])


def _by_band(title: str, rows: Sequence[dict[str, Spread]]) -> list[Column]:
    return [
        column
        for band in BANDS
        for column in _spread(f"{title}, {band.name}", [bands.get(band.name) for bands in rows])
    ]


def _name(x: AccuracyFigures) -> str:
    name = x.row.provider
    return text.bold(name) if name in QUOTED else name


def _spread(title: str, cells: Sequence[Spread | None]) -> list[Column]:
    medians = [x.median if x else None for x in cells]
    maxima = [x.maximum if x else None for x in cells]
    return [(f"{title}: median", _ranked(medians)), ("max", _ranked(maxima))]


def _ranked(values: Sequence[float | None]) -> list[str]:
    return text.bold_least(values, [text.error(value) for value in values])
