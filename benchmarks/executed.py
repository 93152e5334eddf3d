"""The table of what GPU kernels execute, from the file that ``test_executed.py`` writes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import text

PATH = Path(__file__).parent / "results" / "executed.json"
TARGETS = ("sm_80", "sm_90", "sm_100")


def table(path: Path = PATH) -> str:
    """Return the file as a table in Markdown: a line for each kernel."""
    if not path.exists():
        return "not measured yet"
    found = json.loads(path.read_text())
    keys = ("provider", "with", "dtype", "kernel", "target")
    sass = {tuple(x[key] for key in keys): x for x in found["compiled"]}
    kinds = ("matrix", "vector", "transcendental", "shared", "scalar", "wait")
    moved = ("loads and stores", "bytes read", "written")
    lines = [["kernel", "logits", *kinds, *moved, *TARGETS, "registers"]]
    order = list(dict.fromkeys(x["with"] for x in found["executed"]))
    for x in sorted(found["executed"], key=lambda x: (order.index(x["with"]), x["dtype"])):
        for work in x["work"]:
            count = work["instructions"]
            key = (x["provider"], x["with"], x["dtype"], work["kernel"])
            of_sass = [sass.get((*key, target)) for target in TARGETS]
            more = f", {x['with']}" if x["with"] else ""
            lines.append([
                f"{x['provider']}{more}: `{work['kernel']}`",
                x["dtype"],
                *(f"{count[kind]:.2f}" for kind in kinds),
                f"{count['load'] + count['store']:.2f}",
                *(f"{work[name]:.1f}" for name in ("read", "written")),
                *(f"{y['instructions']:.1f}" if y else "" for y in of_sass),
                str(of_sass[1]["registers"]) if of_sass[1] else "",
            ])  # fmt: skip
    where = found["environment"]
    versions = ", ".join(f"{n} {where['versions'][n]}" for n in ("triton", "trl", "liger-kernel"))
    return f"{text.markdown(lines)}\n\n{where['date'][:10]}, {where['commit'][:12]}, {versions}."
