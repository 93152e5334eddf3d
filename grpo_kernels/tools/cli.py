"""``grpo-kernels``: facts about this installation, a check of it, estimates for a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from grpo_kernels.integrations import HOSTS
from grpo_kernels.tools import check, machine, plan
from grpo_kernels.tools.text import OneLineParser, aligned, in_units


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 0, or 1 when a check failed.

    What is wrong with an argument ends in one line on stderr and exit code 2.
    """
    parser = OneLineParser(prog="grpo-kernels", description=__doc__)
    parser.set_defaults(run=lambda arguments: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[..., int | None], words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words)
        made.set_defaults(run=run, parser=made)
        return made

    info = command("info", _info, "versions, devices, and which backend runs on them")
    info.add_argument("--json", action="store_true", help="for programs")
    checked = "GEMMs of this machine; values and gradients of every backend, against fp64"
    command("check", _check, checked)
    found = "other trainers: which are here, and which versions ours was tested with"
    command("doctor", _doctor, found)
    estimated = "memory and time of a model's head, without running it"
    plan.add_arguments(command("plan", plan.run, estimated))
    arguments = parser.parse_args(argv)
    return arguments.run(arguments) or 0


def _info(arguments: argparse.Namespace) -> None:
    facts = machine.facts()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    _show_versions(facts["versions"])
    devices = []
    for device in facts["devices"]:
        threads = f", {device['threads']} threads" if "threads" in device else ""
        memory, capability = in_units(device["memory_bytes"]), device["capability"]
        name = f"{device['device']}: {device['name']}"
        devices.append(f"{name}, {memory}, capability {capability}{threads}")
    _show("devices", devices)
    _show("native kernels for the CPU", [", ".join(facts["native_isas"]) or "not built"])
    _show_backends(facts["backends"])
    rows = [["", "backend", "rows of a tile"]]
    failed: list[str] = []  # why nothing runs, where nothing does
    for row in facts["defaults"]:
        where = f"{row['device']}, {row['dtype']}"
        rows.append([where, row["backend"] or "-", str(row["chunk_rows"] or "-")])
        failed += row["reasons"] if row["backend"] is None else []
    title = f"defaults, at a vocabulary of {facts['example_vocabulary']:,}"
    _show(title, [*aligned(rows), *dict.fromkeys(failed)])
    given = [f"{name}={value}" for name, value in facts["environment"].items() if value is not None]
    _show("environment", given or ["nothing set"])


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


def _doctor(arguments: argparse.Namespace) -> None:
    for adapter, host in HOSTS.items():
        tested = f"{host.package}, tested with {', '.join(host.tested)}"
        print(f"{adapter}: {machine.installed_version(host.package) or 'not installed'} ({tested})")


def _show(title: str, lines: Iterable[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n")


def _show_versions(versions: Mapping[str, str | None]) -> None:
    _show("versions", aligned([[name, version or "-"] for name, version in versions.items()]))


def _show_backends(backends: Mapping[str, str | None]) -> None:
    _show("backends", (f"{name}: {reason or 'available'}" for name, reason in backends.items()))


if __name__ == "__main__":
    raise SystemExit(main())
