"""``python -m benchmarks.report [FOLDER]``: tables and plots of the result files in FOLDER.

By default FOLDER is ``benchmarks/results``. Beside the files of every device go its plots and a
``report.md`` with all of its tables; the first cases are printed, a line each. With ``--documents``
the blocks of README, ``benchmarks/README.md`` and ``docs/integrations.md`` are made anew: cog runs
what stands in their markers.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import cache
from pathlib import Path

from benchmarks import executed as counted
from benchmarks import text
from benchmarks.accuracy.providers import PROVIDERS
from benchmarks.environment import ROOT
from benchmarks.plots import PLOTS, save_plots
from benchmarks.results import RESULTS, Device, Table, load
from benchmarks.shapes import MODELS
from benchmarks.tables import backwards, heads, others
from benchmarks.tables.columns import in_order
from benchmarks.tables.hosts import hosts
from benchmarks.tables.sharded import sharded
from benchmarks.work import WORKS

NOT_MEASURED = "not measured yet"
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/integrations.md")
_PRINTED = 14  # cases of a device
# what a block can show of a device, with a title
BLOCKS = {
    "standings": ("Everybody over all cases", lambda device: heads.standings(device.tables)),
    "cases": ("Every case in a line", lambda device: heads.cases(device.tables)),
    "schedules": ("One pass or two", lambda device: heads.schedules(device.tables)),
    "training": ("Training step", lambda device: others.training(device.training)),
    "savings": ("What is saved", lambda device: others.savings(device.savings)),
    "backwards": ("Backwards", lambda device: backwards.backwards(device.backwards)),
    "sharded": ("Over several ranks", lambda device: sharded(device.sharded)),
    "hosts": ("In other trainers", lambda device: hosts(device.hosts)),
    "rollouts": (
        "Generation and the rest of a step",
        lambda device: others.rollouts(device.rollouts),
    ),
    "accuracy": (
        "Errors on a policy's distributions",
        lambda device: others.accuracy(device.accuracy),
    ),
}


def show(block: str, kind: str, devices: dict[str, Device] | None = None) -> str:
    """Write a block, of the newest device of the kind "cpu" or "cuda"."""
    found = newest(kind, devices)
    return (BLOCKS[block][1](found) if found else "") or NOT_MEASURED


def executed() -> str:
    """Write what GPU kernels execute for a logit."""
    return counted.table()


def headline(
    kind: str, work: str, model: str, tokens: int, devices: dict[str, Device] | None = None
) -> str:
    """Write one case in every dtype, of the newest device of a kind."""
    device = newest(kind, devices)
    found = [
        table
        for table in (device.tables if device else [])
        if (table.work, table.model, table.tokens) == (work, model, tokens)
    ]
    return heads.headline(found) if found else NOT_MEASURED


def plots(kind: str, folder: str) -> str:
    """Link to the pictures of the newest device of a kind; ``folder``: of the results."""
    return _links(kind, folder, {name: title for name, (title, _) in PLOTS.items()})


def _links(kind: str, folder: str, titles: dict[str, str]) -> str:
    device = newest(kind)
    there = [x for x in titles if device and (RESULTS / device.slug / f"{x}.png").exists()]
    links = [f"![{titles[name]}]({folder}/{device.slug}/{name}.png)" for name in there if device]
    return "\n\n".join(links) or NOT_MEASURED


def write_documents(check: bool = False) -> int:
    """Fill the blocks, or only check them; not 0 where one is not as it would be."""
    from cogapp import Cog

    paths = [str(ROOT / name) for name in DOCUMENTS]
    options = ["--check" if check else "-r", "-P", "-p", "from benchmarks.report import *"]
    return Cog().main(["cog", *options, *paths])


def newest(kind: str, devices: dict[str, Device] | None = None) -> Device | None:
    every = (_stored() if devices is None else devices).values()
    found = (device for device in every if device.environment.kind == kind)
    return max(found, key=lambda device: device.environment.date, default=None)


_stored = cache(load)


def models() -> str:
    rows = (
        [f"`{x.name}`", str(x.hidden), str(x.vocabulary), f"{x.softcap:g}" if x.softcap else ""]
        for x in MODELS.values()
    )
    return text.table(["", "hidden", "vocabulary", "softcap"], rows)


def works() -> str:
    return "\n".join(f"* `{name}`: {work.title}" for name, work in WORKS.items())


def providers() -> str:
    return "\n".join(f"* `{name}`: {provider.note}" for name, provider in PROVIDERS.items())


def report(device: Device) -> str:
    """Write every block of a device, and a table of every case."""
    parts = [f"# {device.environment.where}"]
    for title, write in BLOCKS.values():
        if shown := write(device):
            parts += [f"## {title}", shown]
    by_case: dict[tuple[str, str, int], list[Table]] = {}
    for table in in_order(device.tables):
        by_case.setdefault((table.work, table.model, table.tokens), []).append(table)
    for (work, model, tokens), tables in by_case.items():
        parts += [f"## {work}, {model}, T = {tokens}", heads.headline(tables, every=True)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--documents", action="store_true", help="fill the documents' blocks")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not folder.is_dir():
        parser.error(f"FOLDER: expected a folder of results, got {folder}")
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        print("matplotlib is not installed: no plots are drawn, the old ones stay")
    for device in load(folder).values():
        if draws:
            save_plots(device.tables, folder / device.slug)
        (folder / device.slug / "report.md").write_text(report(device))
        print(f"{folder / device.slug}: {len(device.tables)} cases of {len(device.runs)} runs")
        print(heads.cases(device.tables[:_PRINTED]))
    if arguments.documents and (code := write_documents()):
        sys.exit(code)


if __name__ == "__main__":
    main()
