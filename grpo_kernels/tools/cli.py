"""``grpo-kernels``: facts about this installation, a check of it, estimates for a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence

from grpo_kernels.common import HOSTS
from grpo_kernels.tools import check, machine, plan
from grpo_kernels.tools.text import OneLineParser, in_units, read_in_part


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
    estimated = "what to set so that a run fits into a GPU; memory and time of a model's head"
    plan.add_arguments(command("plan", plan.run, estimated))
    with read_in_part():
        arguments = parser.parse_args(argv)
        return arguments.run(arguments) or 0


def _info(arguments: argparse.Namespace) -> None:
    facts = machine.facts()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    _show("versions", facts["versions"], "-")
    devices = {}
    for device in facts["devices"]:
        threads = f", {device['threads']} threads" if "threads" in device else ""
        memory = in_units(device["memory_bytes"])
        devices[device["device"]] = (
            f"{device['name']}, {memory}, capability {device['capability']}{threads}"
        )
    _show("devices", devices)
    _show("native kernels", {"cpu": ", ".join(facts["native_isas"]) or None}, "not built")
    _show("backends", facts["backends"], "available")
    defaults = {
        f"{row['device']}, {row['dtype']}": "; ".join(row["reasons"])
        if row["backend"] is None
        else f"{row['backend']}, {row['chunk_rows']} rows of a tile"
        for row in facts["defaults"]
    }
    _show(f"defaults, at a vocabulary of {facts['example_vocabulary']:,}", defaults)
    _show("environment", facts["environment"], "not set")


def _check(arguments: argparse.Namespace) -> int:
    _show("versions", machine.versions(), "-")
    print(check.LEGEND)
    print(check.LINE.format("backend", "device", "dtype", "what", "error", "allowed", ""))
    done = []
    for ok, line in check.outcomes():
        print(line, flush=True)  # at once: the next one may crash
        done.append((ok, line))
    _show("backends", machine.unavailable_backends(), "available")
    failed = [line for ok, line in done if not ok]
    print(f"{len(done)} checks, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def _doctor(arguments: argparse.Namespace) -> None:
    for adapter, host in HOSTS.items():
        tested = f"{host.package}, tested with {', '.join(host.tested)}"
        print(f"{adapter}: {machine.installed_version(host.package) or 'not installed'} ({tested})")


def _show(title: str, facts: Mapping[str, str | None], none: str = "") -> None:
    print(title, *(f"  {name}: {value or none}" for name, value in facts.items()), sep="\n")


if __name__ == "__main__":
    raise SystemExit(main())
