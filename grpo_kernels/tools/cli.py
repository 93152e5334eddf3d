"""``grpo-kernels``: facts about this installation, a check of it, estimates for a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_kernels.integrations import HOSTS
from grpo_kernels.tools import check, machine, plan_command
from grpo_kernels.tools.text import OneLineParser, aligned, in_units

_OPTIONAL = "transformers"  # of the extra `tools`


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 0, or 1 when a check failed.

    What is wrong with an argument ends in one line on stderr and exit code 2.
    """
    parser = _parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if arguments.run is None:
        parser.print_help()
        return 0
    command: OneLineParser = arguments.parser
    try:
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name != _OPTIONAL:
            raise
        command.error(
            f"expected the package {error.name} to be installed; {machine.install_command('tools')}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="grpo-kernels", description=__doc__)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], words: str) -> OneLineParser:
        command = commands.add_parser(name, help=words)
        command.set_defaults(run=run, parser=command)
        return command

    info = add("info", _info, "versions, devices, and which backend runs on them")
    info.add_argument("--json", action="store_true", help="for programs")
    checked = "GEMMs of this machine; values and gradients of every backend, against fp64"
    add("check", _check, checked)
    add(
        "doctor", _doctor, "other trainers: which are here, and which versions ours was tested with"
    )
    plan_command.add_arguments(
        add("plan", plan_command.run, "memory and time of a model's head, without running it")
    )
    return parser


def _info(arguments: argparse.Namespace) -> int:
    facts = machine.facts()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    defaults, variables = facts["defaults"], facts["environment"].items()
    rows = [["", "backend", "rows of a tile"]]
    for row in defaults:
        where = f"{row['device']}, {row['dtype']}"
        rows.append([where, row["backend"] or "-", str(row["chunk_rows"] or "-")])
    # why nothing runs, where nothing does
    failed = (reason for row in defaults if row["backend"] is None for reason in row["reasons"])
    _show("versions", _versions(facts["versions"]))
    _show("devices", map(_device, facts["devices"]))
    _show("native kernels for the CPU", [", ".join(facts["native_isas"]) or "not built"])
    _show("backends", _backends(facts["backends"]))
    title = f"defaults, at a vocabulary of {facts['example_vocabulary']:,}"
    _show(title, [*aligned(rows), *dict.fromkeys(failed)])
    given = [f"{name}={value}" for name, value in variables if value is not None]
    _show("environment", given or ["nothing set"])
    return 0


def _show(title: str, lines: Iterable[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n")


def _versions(versions: Mapping[str, str | None]) -> list[str]:
    return aligned([[name, version or "-"] for name, version in versions.items()])


def _device(device: Mapping[str, Any]) -> str:
    threads = f", {device['threads']} threads" if "threads" in device else ""
    return (
        f"{device['device']}: {device['name']}, {in_units(device['memory_bytes'])}, "
        f"capability {device['capability']}{threads}"
    )


def _backends(backends: Mapping[str, str | None]) -> list[str]:
    return [f"{name}: {reason or 'available'}" for name, reason in backends.items()]


def _check(arguments: argparse.Namespace) -> int:
    _show("versions", _versions(machine.versions()))
    print(check.LINE.format("backend", "device", "dtype", "what", "error", "allowed", ""))
    done = []
    for ok, line in check.outcomes():
        print(line, flush=True)  # at once: the next one may crash
        done.append((ok, line))
    _show("backends", _backends(machine.unavailable_backends()))
    failed = [line for ok, line in done if not ok]
    print(f"{len(done)} checks, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def _doctor(arguments: argparse.Namespace) -> int:
    for adapter, host in HOSTS.items():
        tested = f"{host.package}, tested with {', '.join(host.tested)}"
        print(f"{adapter}: {machine.installed_version(host.package) or 'not installed'} ({tested})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
