"""Tables of whole steps, of what is saved, and of errors token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from benchmarks import text
from benchmarks.figures import (
    BANDS,
    AccuracyFigures,
    Spread,
    accuracy_figures,
    here,
    medians,
    ratio,
    spread,
    within,
)
from benchmarks.results import AccuracyTable, RolloutsEntry, SavingsTable, TrainingTable
from benchmarks.rollouts.engines import ENGINES, NOT_INSTALLED
from benchmarks.tables.columns import (
    Column,
    column,
    error_list,
    in_order,
    join,
    names,
    with_missing,
)
from benchmarks.work import WORKS


def training(tables: Sequence[TrainingTable]) -> str:
    """Show a line per trainer."""
    return "\n\n".join(f"{table.model}:\n\n{_training(table)}" for table in tables)


def _training(table: TrainingTable) -> str:
    rows = here(table.rows)
    columns = [names(row.provider for row in rows)]
    for phase in ("", "generate", "train"):
        timed, found = medians(rows, phase), [row.provider for row in rows]
        columns += [
            (f"{phase or 'step'}: median", [text.duration(timed.get(name)) for name in found]),
            ("x ours", [text.ratio(ratio(timed, name, "ours")) for name in found]),
        ]
    columns += [
        ("train: peak MiB", [text.mib((row.memory or {}).get("train")) for row in rows]),
        ("errors", [error_list(row.errors) for row in rows]),
        # the loss of an on-policy step is 0 but for rounding; its gradient is not
        ("gradient norm: first step, last", [_ends(row.grad_norm) for row in rows]),
    ]
    for index, row in enumerate(rows):
        if row.failure:
            columns[1][1][index] = f"FAILED: {row.failure}"
    return with_missing(join(columns), table.rows)


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3g}, {values[-1]:.3g}" if values else ""


def savings(tables: Sequence[SavingsTable]) -> str:
    """Show a line per variant; its time beside that of the variant it saves from."""
    return "\n\n".join(f"{_savings_caption(table)}\n\n{_savings(table)}" for table in tables)


def _savings_caption(table: SavingsTable) -> str:
    return (
        f"dapo loss, forward + backward; {table.model} (D = {table.hidden}, V = "
        f"{table.vocabulary}), T = {table.tokens}, {table.dtype}; errors against "
        f"{table.reference}. {table.environment.where}."
    )


def _savings(table: SavingsTable) -> str:
    timed, lines = medians(table.rows), []
    for row in here(table.rows):
        saved = ratio(timed, row.provider, row.base)
        time = text.duration(timed.get(row.provider)) or f"FAILED: {row.failure}"
        beside = f"{text.ratio(saved)} x {row.base}" if saved else ""
        lines.append([row.provider, row.note, time, beside, error_list(row.errors)])
    return text.table(["", "what is computed", "median", "time", "errors"], lines)


_LEGENDS = {
    False: "Against fp64 of the same inputs, on tokens drawn from the distributions themselves. "
    "logp: absolute errors of the log-probabilities, by the probability p of the token. Ratio "
    "noise: |exp(logp - exact) - 1|, by how much an importance ratio is off whose other side is "
    "exact; on-policy it ought to be 1. H: absolute errors of the entropy.",
    True: "A loss on the same kind of tokens, off-policy, so that some are clipped. loss: absolute "
    "error; dhidden and dweight: norm of the difference over the norm. Of a row of dhidden, where "
    "it has a gradient, the same by the probability p of its token: a row at p near 1 is a small "
    "difference of large terms, which rounded logits get wrong. Gradients are returned in the "
    "dtype of the inputs, and nobody is more exact than that.",
}


def accuracy(tables: Sequence[AccuracyTable]) -> str:
    """Show errors of values, then of gradients; the rounded dtype first."""
    parts = []
    ordered = sorted(in_order(tables), key=lambda x: (x.of_gradients, x.dtype))
    for kind, legend in _LEGENDS.items():
        if found := [table for table in ordered if table.of_gradients == kind]:
            parts.append(legend)
            for table in found:
                parts += [_accuracy_caption(table), accuracy_table(table)]
    return "\n\n".join(parts)


def _accuracy_caption(table: AccuracyTable) -> str:
    """Describe the distributions."""
    bands = ", ".join(
        f"{100 * len(within(band, table.logprobs)) / len(table.logprobs):.0f} % {band}"
        for band in BANDS
    )
    entropies, ordered = "", sorted(table.entropy)
    if found := spread(ordered):
        high = ordered[int(0.9 * (len(ordered) - 1))]
        entropies = (
            f" Entropies: median {text.digits(found.median, 2)}, nine tenths below "
            f"{text.digits(high, 2)}, at most {text.digits(found.maximum, 2)} nats."
        )
    work = f"{WORKS[table.work].title}. " if table.of_gradients else ""
    softcap = f", softcap {table.softcap:g}" if table.softcap is not None else ""
    return (
        f"{work}{table.model} (D = {table.hidden}, V = {table.vocabulary}{softcap}), "
        f"{table.dtype}; T = {table.tokens} tokens: {bands}; the rarest "
        f"{text.error(math.exp(min(table.logprobs)))}.{entropies} {table.environment.where}; "
        f"{table.environment.day}."
    )


def accuracy_table(table: AccuracyTable) -> str:
    """Show a line per provider that gave values or failed, then who gave none, and why."""
    rows = list(accuracy_figures(table).values())
    measured = _gradients(rows) if table.of_gradients else _values(rows)
    for index, x in enumerate(rows):
        if x.row.failure:
            measured[0][1][index] = f"FAILED: {x.row.failure}"
    return with_missing(join([names(x.name for x in rows), *measured]), table.rows)


def _values(rows: Sequence[AccuracyFigures]) -> list[Column]:
    columns: list[Column] = []
    for band in BANDS:
        columns += _spread(rows, f"logp, {band}", [x.logprobs.get(band) for x in rows])
    columns += [
        column("ratio noise: mean", rows, lambda x: x.mean_noise, text.error),
        column("max", rows, lambda x: x.noise and x.noise.maximum, text.error),
    ]
    entropy = _spread(rows, "H", [x.entropy for x in rows])
    for index, x in enumerate(rows):
        if x.entropy is None and x.row.failure is None:
            entropy[0][1][index] = "none"
    return [*columns, *entropy]


def _gradients(rows: Sequence[AccuracyFigures]) -> list[Column]:
    outputs = ("loss", "dhidden", "dweight")
    columns = [column(k, rows, lambda x, k=k: x.row.errors.get(k), text.error) for k in outputs]
    for band in BANDS:
        columns += _spread(rows, f"rows of dhidden, {band}", [x.gradients.get(band) for x in rows])
    return columns


def _spread(
    rows: Sequence[AccuracyFigures], title: str, found: Sequence[Spread | None]
) -> list[Column]:
    by_name = {x.name: value for x, value in zip(rows, found, strict=True) if value}

    def of(part: str):
        return lambda x: getattr(by_name[x.name], part) if x.name in by_name else None

    return [
        column(f"{title}: median", rows, of("median"), text.error),
        column("max", rows, of("maximum"), text.error),
    ]


_PHASES = {
    "generate": "generate",
    "sync": "update",
    "score": "rewards",
    "old": "old policy",
    "ref": "reference",
    "loss": "loss",
}
_ROLLOUTS_LEGEND = (
    "Medians over the steps of one run of the trainer, by the clock that it logs. generated: "
    "completion tokens over the seconds of generation. update: from the trainer's weights to an "
    "engine that can generate with them; transformers' engines have the policy's own. The rest are "
    "shares of a step; of the generation that overlaps with training only the wait counts."
)


def rollouts(entries: Sequence[RolloutsEntry]) -> str:
    """Show a table per model, from the smallest, and what the lines mean."""
    if not entries:
        return ""
    engines, parts = [engine.name for engine in ENGINES], [_ROLLOUTS_LEGEND]
    ordered = sorted(entries, key=lambda x: (x.parameters, engines.index(x.engine)))
    sizes = {x.model: x.parameters for x in ordered}  # of those that did not fail, the last
    for model, size in sorted(sizes.items(), key=lambda item: item[1]):
        found = [x for x in ordered if x.model == model]
        found.sort(key=lambda x: engines.index(x.engine))
        parts += [
            f"{model}, {text.digits(size / 1e6)} million parameters, {found[0].dtype}; "
            f"{found[0].sequences} completions of up to {found[0].completion_tokens} tokens after "
            f"{found[0].prompt_tokens}:",
            text.table(
                ["", "generated, tokens/s", "update, s", "update, GiB/s", "step, s"]
                + [f"{title}, %" for title in _PHASES.values()],
                map(_engine, found),
            ),
        ]
    seen = {x.engine for x in entries}
    parts.append("\n".join(f"* `{x.name}`: {x.note}." for x in ENGINES if x.name in seen))
    if absent := [engine.name for engine in ENGINES if engine.sent and engine.name not in seen]:
        parts.append(f"{', '.join(absent)}: {NOT_INSTALLED}.")
    return "\n\n".join(parts)


def _engine(entry: RolloutsEntry) -> list[str]:
    if entry.failure is not None:
        return [entry.engine, f"FAILED: {entry.failure}", *[""] * (3 + len(_PHASES))]
    rate = update = speed = ""
    if not entry.engine.endswith("-overlap"):  # the wait says nothing about how fast it is
        pairs = zip(entry.tokens, entry.phases["generate"], strict=True)
        rate = text.digits(median(tokens / seconds for tokens, seconds in pairs))
    if entry.sent:
        seconds = median(entry.phases["sync"])
        update, speed = text.digits(seconds), text.digits(entry.weight_bytes / 2**30 / seconds)
    shares = [
        f"{100 * sum(entry.phases[phase]) / sum(entry.seconds):.0f}"
        if phase in entry.phases and (phase != "sync" or entry.sent)
        else ""
        for phase in _PHASES
    ]
    return [entry.engine, rate, update, speed, text.digits(median(entry.seconds)), *shares]
