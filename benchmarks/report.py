"""``python -m benchmarks.report``: measures, and writes JSON, a Markdown table and a plot."""

from __future__ import annotations

import argparse
import json

from benchmarks.measure import WORKS, measure
from benchmarks.plot import save_plot
from benchmarks.providers import PROVIDERS
from benchmarks.record import RESULTS, record, save
from benchmarks.shapes import DTYPES, FULL, SHAPES
from benchmarks.table import markdown


def main() -> None:
    arguments = _parser().parse_args()
    providers = [PROVIDERS[name] for name in arguments.providers]
    for name in arguments.shapes:
        for dtype in arguments.dtypes:
            for work in arguments.works:
                rows = measure(providers, SHAPES[name], dtype, work, arguments.rounds)
                data = record(rows, SHAPES[name], dtype, work)
                print(markdown(data), flush=True)
                save(data)
    write_report()


def write_report() -> None:
    """The table and the plot of all results in the folder."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    (RESULTS / "report.md").write_text("\n".join(markdown(data) for data in results))
    save_plot(results, RESULTS / "report.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(FULL))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--rounds", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
