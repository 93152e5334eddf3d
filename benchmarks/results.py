"""``python -m benchmarks.results [FOLDER]``: tables, plots and the numbers in the documents.

Reads the result files of every device in FOLDER, by default ``benchmarks/results``, and writes
``report.md`` and the plots beside them. Of the default folder, the marked places in README and
docs are rewritten too.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks import text
from benchmarks.accuracy.derive import is_of_gradients
from benchmarks.accuracy.table import accuracy_table, caption, legend
from benchmarks.accuracy.table import in_order as accuracy_in_order
from benchmarks.context import threads
from benchmarks.derive import case
from benchmarks.load import (
    RESULTS,
    AccuracyTable,
    Device,
    Environment,
    SavingsTable,
    Table,
    Tests,
    TrainingTable,
    load,
)
from benchmarks.markers import rewrite_documents
from benchmarks.overview import in_order, summary
from benchmarks.plots import PLOTS, save_plots
from benchmarks.rollouts.table import rollouts
from benchmarks.savings.table import caption as savings_caption
from benchmarks.savings.table import savings_table
from benchmarks.schedules import matches, schedules_table
from benchmarks.standing import standings
from benchmarks.table import case_table, column_legend, training_table
from benchmarks.work import WORKS

REPORT = "report.md"


def main() -> None:
    parser = _parser()
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"FOLDER: expected a folder of results, got {folder}")
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        print("matplotlib is not installed: no plots are drawn, the old ones stay")
    devices = load(folder)
    for device in devices.values():
        place = folder / device.slug
        if draws:
            save_plots(device.tables, place, device.accuracy)
        (place / REPORT).write_text(report(device, place))
        print(f"{place / REPORT}: {len(device.tables)} cases of {len(device.runs)} runs")
    if not devices:
        print(f"{folder}: no device has result files there")
    for path in sorted(folder.glob("*.json")):
        print(f"{path}: left out, it is not in the folder of a device")
    if folder.resolve() == RESULTS.resolve():
        for path in rewrite_documents(devices):
            print(f"{path}: numbers rewritten")


def report(device: Device, place: Path) -> str:
    """All of a device's results as Markdown, with the plots that lie in ``place``."""
    parts = [f"# {device.environment.device}", *_facts(device)]
    if device.tables:
        parts += ["## At a glance", _PROVIDERS, standings(device.tables)]
        parts += ["### Every case", _CASES, summary(device.tables)]
    if matches(device.tables):
        parts += ["## One pass or two", _SCHEDULES, schedules_table(device.tables)]
    if device.training:
        parts.append("## Training step")
        parts += [part for table in device.training for part in _training(table)]
    if device.rollouts:
        parts += ["## Generation and the rest of a step", rollouts(device.rollouts)]
    if device.savings:
        parts.append("## What is saved")
        parts += [part for table in device.savings for part in _savings(table)]
    if device.accuracy:
        parts += ["## Errors on a policy's distributions", legend(device.accuracy)]
        parts += [part for table in accuracy_in_order(device.accuracy) for part in _accuracy(table)]
    plots = [plot for plot in PLOTS if (place / plot.file).exists()]
    if plots:
        parts.append("## Plots")
        parts += [f"![{plot.title}]({plot.file})" for plot in plots]
    if device.tables:
        parts += ["## How to read the tables", _legend(device)]
    for work, tables in groupby(in_order(device.tables), key=lambda table: table.work):
        parts.append(f"## {WORKS[work].name}: {WORKS[work].title}")
        parts += [part for table in tables for part in _case(table)]
    return "\n\n".join(parts) + "\n"


_PROVIDERS = (
    "Every provider over all of its cases: the median, and in brackets from the least to the most. "
    "`ours` keeps the logits unrounded; `ours-input` rounds them to the input dtype, as most peers "
    "do. Who is fast: x floor. Who is small: extra memory. Who is exact: the largest errors of "
    "values (loss, log-probabilities, entropy) and of gradients, and whether the bits stay."
)
_CASES = (
    "Time over that of the floor, the bare matrix products, and memory beyond inputs and results. "
    "Of ours and the best peer the smallest is bold. A link leads to all providers of the case."
)

_SCHEDULES = (
    "`one_pass` computes the gradients in the forward, `two_pass` forms the logits again. `ours` "
    "takes what a short rule says (`auto`). Runs from before there was a choice show what it says "
    "now."
)


def _facts(device: Device) -> Iterator[str]:
    environment = device.environment
    hardware = [f"{environment.memory_gib:.0f} GiB"]
    if environment.kind == "cpu":
        hardware += [threads(environment), environment.isa or "unknown instructions"]
    yield f"{', '.join(hardware)}. Of several runs the newest that has a case counts."
    header = ["run", "commit", "cases", "load", "versions"]
    yield text.markdown_table(header, [_run(run.environment, device) for run in device.runs])
    if device.tested and device.tested.tests:
        yield tests_line(device.tested.tests, device.tested.environment)


def _run(environment: Environment, device: Device) -> list[str]:
    count = sum(table.environment == environment for table in device.tables)
    return [
        environment.day,
        environment.source,
        str(count),
        f"{environment.load_average:.1f}",
        versions(environment),
    ]


def versions(environment: Environment) -> str:
    """Of Python and the packages; what is not installed comes last."""
    installed = {name: x for name, x in environment.versions.items() if x}
    named = [f"{name} {version}" for name, version in installed.items()]
    absent = [name for name in environment.versions if name not in installed]
    without = f"; without {', '.join(absent)}" if absent else ""
    return f"python {environment.python}, {', '.join(named)}{without}"


def tests_line(tests: Tests, environment: Environment) -> str:
    return (
        f"Tests on this machine ({environment.source}): {tests.passed} passed, {tests.failed} "
        f"failed, {tests.skipped} skipped, in {text.duration(tests.seconds)}."
    )


def _legend(device: Device) -> str:
    rows = [row for table in device.tables for row in table.rows]
    notes = {row.provider: row.note for row in reversed(rows)}
    ordered = dict.fromkeys(row.provider for row in rows)
    providers = [f"* `{name}`: {notes[name]}." for name in ordered]
    alone = "* (alone): timed in a process of its own, not in turn with the others."
    return "\n".join([column_legend(), alone, "", "Providers:", "", *providers])


def _case(table: Table) -> Iterator[str]:
    yield f"### {case(table)}"
    softcap = f", softcap {table.softcap:g}" if table.softcap is not None else ""
    yield (
        f"B = {table.sequences}, D = {table.hidden}, V = {table.vocabulary}{softcap}; errors "
        f"against {table.reference}; {_when(table.environment)}."
    )
    yield case_table(table)


def _training(table: TrainingTable) -> Iterable[str]:
    facts = {"tokens": table.tokens, "dtype": table.dtype, **table.facts}
    nested = {name: value for name, value in facts.items() if isinstance(value, dict)}
    plain = {name: value for name, value in facts.items() if name not in nested}
    for part in nested.values():
        plain |= part
    listed = ", ".join(f"{name} {value}" for name, value in plain.items())
    return (
        f"### {table.model}",
        f"{listed}; {_when(table.environment)}.",
        training_table(table),
        "\n".join(f"* `{row.provider}`: {row.note}." for row in table.rows),
    )


def _savings(table: SavingsTable) -> Iterable[str]:
    return (
        f"### {table.model}, T={table.tokens}, {table.dtype}",
        f"{savings_caption(table)} {_when(table.environment).capitalize()}.",
        savings_table(table),
    )


def _accuracy(table: AccuracyTable) -> Iterable[str]:
    return (
        f"### {'gradients, ' if is_of_gradients(table) else ''}{table.model}, {table.dtype}",
        f"{caption(table)} {_when(table.environment).capitalize()}.",
        accuracy_table(table),
        "\n".join(
            f"* `{row.provider}`: {row.note}." for row in table.rows if row.logprobs or row.errors
        ),
    )


def _when(environment: Environment) -> str:
    return f"measured {environment.day} at {environment.source}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="FOLDER")
    return parser


if __name__ == "__main__":
    main()
