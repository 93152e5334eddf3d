"""``grpo-kernels``: inspect and check this installation; estimate memory and time for a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_kernels.common import HOSTS
from grpo_kernels.tools import check, machine, plan
from grpo_kernels.tools.text import OneLineParser, in_units, read_in_part


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 0, or 1 if a check failed.

    A wrong argument prints one line on stderr and exits with code 2.
    """
    parser = OneLineParser(prog="grpo-kernels", description=__doc__)
    parser.set_defaults(run=lambda arguments: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[..., int | None], words: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=words)
        subparser.set_defaults(run=run, parser=subparser)
        return subparser

    info = command("info", _info, "show versions, devices, and the default backend of each")
    info.add_argument("--json", action="store_true", help="print JSON")
    command(
        "check",
        _check,
        "check GEMMs, and values and gradients of every backend, against fp64 (about a minute)",
    )
    command(
        "doctor",
        _doctor,
        "list the supported trainers: installed version, and versions tested with grpo-kernels",
    )
    planner = command(
        "plan",
        plan.run,
        "find settings with which a run fits into a GPU; estimate memory and time of the LM head",
    )
    plan.add_arguments(planner)
    with read_in_part():
        arguments = parser.parse_args(argv)
        return arguments.run(arguments) or 0


def _info(arguments: argparse.Namespace) -> None:
    facts = machine.facts()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    _show("versions", facts["versions"], "-")
    _show("devices", {device["device"]: _device(device) for device in facts["devices"]})
    _show("native kernels", {"cpu": ", ".join(facts["native_isas"])}, "not built")
    _show("backends", facts["backends"], "available")
    defaults = {f"{row['device']}, {row['dtype']}": _default(row) for row in facts["defaults"]}
    _show(f"defaults, at a vocabulary of {facts['example_vocabulary']:,}", defaults)
    _show("environment", facts["environment"], "not set")


def _device(device: dict[str, Any]) -> str:
    memory = in_units(device["memory_bytes"])
    threads = f", {device['threads']} threads" if "threads" in device else ""
    return f"{device['name']}, {memory}, capability {device['capability']}{threads}"


def _default(row: dict[str, Any]) -> str:
    if row["backend"] is None:
        return "; ".join(row["reasons"])
    return f"{row['backend']}, tiles of {row['chunk_rows']} rows"


def _check(arguments: argparse.Namespace) -> int:
    _show("versions", machine.versions(), "-")
    print(check.LEGEND)
    print(check.LINE.format("backend", "device", "dtype", "what", "error", "allowed", ""))
    results = []
    for passed, line in check.outcomes():
        print(line, flush=True)  # now: the next check may crash
        results.append((passed, line))
    failed = [line for passed, line in results if not passed]
    _show("backends", machine.unavailable_backends(), "available")
    print(f"{len(results)} checks, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def _doctor(arguments: argparse.Namespace) -> None:
    for adapter, host in HOSTS.items():
        version = machine.installed_version(host.package) or "not installed"
        print(f"{adapter}: {version} ({host.package}, tested with {', '.join(host.tested)})")


def _show(title: str, facts: Mapping[str, str | None], none: str = "") -> None:
    print(title, *(f"  {name}: {value or none}" for name, value in facts.items()), sep="\n")


if __name__ == "__main__":
    raise SystemExit(main())
