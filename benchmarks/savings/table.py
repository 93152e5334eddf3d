"""The table of what is saved."""

from __future__ import annotations

from benchmarks import text
from benchmarks.derive import here, times
from benchmarks.load import SavingsTable


def savings_table(table: SavingsTable) -> str:
    """A line per variant; its time beside that of the variant it saves from."""
    rows, timed = table.rows, times(table.rows)
    unit = text.unit_for(x.median for x in timed.values())
    lines = []
    for row in here(rows):
        found = timed.get(row.provider)
        ratio = found.to.get(row.base) if found and row.base else None
        lines.append(
            [
                row.provider,
                row.note,
                unit.of(found.median) if found else f"FAILED: {row.failure}",
                f"{text.ratio(ratio)} x {row.base}" if ratio else "",
                ", ".join(f"{name} {text.error(value)}" for name, value in row.errors.items()),
            ]
        )
    header = ["", "what is computed", f"median, {unit.name}", "time", "errors"]
    return text.markdown_table(header, lines)


def caption(table: SavingsTable) -> str:
    return (
        f"dapo loss, forward + backward; {table.model} (D = {table.hidden}, V = "
        f"{table.vocabulary}), T = {table.tokens}, {table.dtype}; errors against {table.reference}."
    )
