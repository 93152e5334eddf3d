"""A result as a Markdown table."""

from __future__ import annotations

from typing import Any

_HEADER = (
    "| | median s | min to max | x floor | x floor, minima | x ours | extra MiB "
    "| + returned MiB | errors |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def markdown(data: dict[str, Any]) -> str:
    """Title, environment and one line per provider."""
    shape, env = data["shape"], data["environment"]
    work = (
        "loss, forward + backward" if data["work"] == "loss" else "log-probabilities, no gradient"
    )
    tokens = shape["sequences"] * shape["length"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    commit = (env["commit"] or "no commit")[:12] + (" + changes" if env["modified"] else "")
    title = (
        f"### {shape['name']}, {data['dtype']}: {work}\n\n"
        f"T={tokens}, D={shape['hidden']}, V={shape['vocabulary']}. {env['device']} "
        f"({env['isa']}), {env['threads']} threads, load {env['load_average']:.1f}; {versions}; "
        f"{commit}; {env['date'][:10]}.\n\n"
    )
    notes = "".join(f"- {row['provider']}: {row['note']}\n" for row in data["rows"])
    return title + _HEADER + "".join(map(_line, data["rows"])) + "\n" + notes


def _line(row: dict[str, Any]) -> str:
    if row["absent"]:
        return f"| {row['provider']} | absent: {row['absent']} | | | | | | | |\n"
    memory = row["memory"]
    cells = [row["provider"]]
    if row["failure"]:
        cells += [f"FAILED: {row['failure']}", "", "", "", ""]
    else:
        spread = f"{row['minimum']:.3f} to {row['maximum']:.3f}" if row["seconds"] else ""
        cells += [_number(row["median"], 3), spread]
        names = ("to_floor", "minimum_to_floor", "to_ours")
        cells += [_number(row[name], 2) for name in names]
    cells += [_mib(memory["extra"]), _mib(memory["returned"])] if memory else ["", ""]
    errors = (
        f"{name.removesuffix('_error')} {value:.0e}"
        for name, value in row["errors"].items()
        if value is not None
    )
    cells.append(", ".join(errors))
    return "| " + " | ".join(cells) + " |\n"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"
