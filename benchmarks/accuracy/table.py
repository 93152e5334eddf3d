"""Errors on a policy's distributions as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import text
from benchmarks.accuracy.derive import BANDS, AccuracyFigures, Spread, accuracy_figures, shares
from benchmarks.derive import QUOTED
from benchmarks.load import AccuracyTable
from benchmarks.shapes import DTYPES, MODELS
from benchmarks.table import with_missing

LEGEND = (
    "Against fp64 of the same inputs, on tokens drawn from the distributions themselves. logp: "
    "absolute errors of the log-probabilities, by the probability p of the token. Ratio noise: "
    "|exp(logp - exact) - 1|, by how much an importance ratio is off whose other side is exact; "
    "on-policy it ought to be 1. H: absolute errors of the entropy."
)


def in_order(tables: Sequence[AccuracyTable]) -> list[AccuracyTable]:
    """As the models and dtypes are listed, the rounded dtype first."""
    models, dtypes = list(MODELS), list(DTYPES)[::-1]
    return sorted(tables, key=lambda x: (models.index(x.model), x.tokens, dtypes.index(x.dtype)))


def caption(table: AccuracyTable) -> str:
    """What the distributions are like."""
    found = shares(table)
    bands = ", ".join(f"{100 * share:.0f} % {name}" for name, share in found.bands.items())
    softcap = f", softcap {table.softcap:g}" if table.softcap is not None else ""
    return (
        f"{table.model} (D = {table.hidden}, V = {table.vocabulary}{softcap}), {table.dtype}; "
        f"T = {table.tokens} tokens: {bands}; the rarest {text.error(found.rarest)}. Entropies: "
        f"median {text.digits(found.entropy.median, 2)}, nine tenths below "
        f"{text.digits(found.high_entropy, 2)}, at most {text.digits(found.entropy.maximum, 2)} "
        f"nats."
    )


def accuracy_table(table: AccuracyTable) -> str:
    """One line per provider that gave values or failed, then who gave none, and why."""
    rows = list(accuracy_figures(table).values())
    header = [""]
    for band in BANDS:
        header += [f"logp, {band.name}: median", "max"]
    header += ["ratio noise: mean", "max", "H: median", "max"]
    columns = [[_name(x) for x in rows]]
    for band in BANDS:
        columns += _spread([x.logprobs.get(band.name) for x in rows])
    columns.append(_ranked([x.noise for x in rows]))
    columns.append(_ranked([x.worst_noise for x in rows]))
    columns += _spread([x.entropy for x in rows])
    for index, x in enumerate(rows):
        if x.row.failure:
            columns[1][index] = f"FAILED: {x.row.failure}"
        elif x.entropy is None:
            columns[-2][index] = "none"
    return with_missing(text.markdown_table(header, zip(*columns, strict=True)), table.rows)


def _name(x: AccuracyFigures) -> str:
    name = x.row.provider
    return text.bold(name) if name in QUOTED else name


def _spread(cells: Sequence[Spread | None]) -> list[list[str]]:
    medians = [x.median if x else None for x in cells]
    maxima = [x.maximum if x else None for x in cells]
    return [_ranked(medians), _ranked(maxima)]


def _ranked(values: Sequence[float | None]) -> list[str]:
    return text.bold_least(values, [text.error(value) for value in values])
