"""``grpo-kernels``: facts about this installation, a check of it, estimates for a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_kernels.integrations import HOSTS
from grpo_kernels.tools import check, machine, plan
from grpo_kernels.tools.text import OneLineParser, aligned, in_units

_OPTIONAL = "transformers"  # of the extra `tools`


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 0, or 1 when a check failed.

    What is wrong with an argument ends in one line on stderr and exit code 2.
    """
    parser = OneLineParser(prog="grpo-kernels", description=__doc__)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (run, words) in _COMMANDS.items():
        command = commands.add_parser(name, help=words)
        command.set_defaults(run=run, parser=command)
        if run is _info:
            command.add_argument("--json", action="store_true", help="for programs")
        elif run is plan.run:
            plan.add_arguments(command)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if arguments.run is None:
        parser.print_help()
        return 0
    chosen: OneLineParser = arguments.parser
    try:
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name != _OPTIONAL:
            raise
        advice = machine.install_command("tools")
        chosen.error(f"expected the package {error.name} to be installed; {advice}")


def _info(arguments: argparse.Namespace) -> int:
    facts = machine.facts()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    _show_versions(facts["versions"])
    _show("devices", map(_device, facts["devices"]))
    _show("native kernels for the CPU", [", ".join(facts["native_isas"]) or "not built"])
    _show_backends(facts["backends"])
    rows = [["", "backend", "rows of a tile"]]
    for row in facts["defaults"]:
        where = f"{row['device']}, {row['dtype']}"
        rows.append([where, row["backend"] or "-", str(row["chunk_rows"] or "-")])
    # why nothing runs, where nothing does
    failed = (why for row in facts["defaults"] if row["backend"] is None for why in row["reasons"])
    title = f"defaults, at a vocabulary of {facts['example_vocabulary']:,}"
    _show(title, [*aligned(rows), *dict.fromkeys(failed)])
    given = [f"{name}={value}" for name, value in facts["environment"].items() if value is not None]
    _show("environment", given or ["nothing set"])
    return 0


def _device(device: Mapping[str, Any]) -> str:
    threads = f", {device['threads']} threads" if "threads" in device else ""
    memory, capability = in_units(device["memory_bytes"]), device["capability"]
    return f"{device['device']}: {device['name']}, {memory}, capability {capability}{threads}"


def _check(arguments: argparse.Namespace) -> int:
    _show_versions(machine.versions())
    print(check.LINE.format("backend", "device", "dtype", "what", "error", "allowed", ""))
    done = []
    for ok, line in check.outcomes():
        print(line, flush=True)  # at once: the next one may crash
        done.append((ok, line))
    _show_backends(machine.unavailable_backends())
    failed = [line for ok, line in done if not ok]
    print(f"{len(done)} checks, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def _doctor(arguments: argparse.Namespace) -> int:
    for adapter, host in HOSTS.items():
        tested = f"{host.package}, tested with {', '.join(host.tested)}"
        print(f"{adapter}: {machine.installed_version(host.package) or 'not installed'} ({tested})")
    return 0


def _show(title: str, lines: Iterable[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n")


def _show_versions(versions: Mapping[str, str | None]) -> None:
    _show("versions", aligned([[name, version or "-"] for name, version in versions.items()]))


def _show_backends(backends: Mapping[str, str | None]) -> None:
    _show("backends", (f"{name}: {reason or 'available'}" for name, reason in backends.items()))


_COMMANDS = {
    "info": (_info, "versions, devices, and which backend runs on them"),
    "check": (_check, "GEMMs of this machine; values and gradients of every backend, against fp64"),
    "doctor": (
        _doctor,
        "other trainers: which are here, and which versions ours was tested with",
    ),
    "plan": (plan.run, "memory and time of a model's head, without running it"),
}

if __name__ == "__main__":
    raise SystemExit(main())
