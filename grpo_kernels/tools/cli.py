"""``grpo-kernels``: facts about this installation, a check of it, estimates for a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from grpo_kernels.integrations import HOSTS
from grpo_kernels.tools import machine
from grpo_kernels.tools.check import Outcome, outcomes
from grpo_kernels.tools.estimate import command as plan_command
from grpo_kernels.tools.text import BadArgumentError, OneLineParser, aligned, in_units

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
    subcommand: OneLineParser = arguments.parser
    try:
        return arguments.run(arguments)
    except BadArgumentError as error:
        subcommand.error(str(error))
    except ModuleNotFoundError as error:
        if error.name != _OPTIONAL:
            raise
        subcommand.error(
            f"expected the package {error.name} to be installed; {machine.install_command('tools')}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="grpo-kernels", description=__doc__)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    info = commands.add_parser("info", help="versions, devices, and which backend runs on them")
    info.add_argument("--json", action="store_true", help="for programs")
    info.set_defaults(run=_info, parser=info)
    check = commands.add_parser(
        "check", help="GEMMs of this machine; values and gradients of every backend, against fp64"
    )
    check.set_defaults(run=_check, parser=check)
    doctor = commands.add_parser(
        "doctor", help="other trainers: which are here, and which versions ours was tested with"
    )
    doctor.set_defaults(run=_doctor, parser=doctor)
    plan = commands.add_parser("plan", help="memory and time of a model's head, without running it")
    plan_command.add_arguments(plan)
    plan.set_defaults(parser=plan)
    return parser


def _info(arguments: argparse.Namespace) -> int:
    facts = machine.facts()
    print(json.dumps(facts, indent=1) if arguments.json else _info_text(facts))
    return 0


def _info_text(facts: dict[str, Any]) -> str:
    defaults = [
        [f"  {row['device']}, {row['dtype']}", row["backend"] or "-", str(row["chunk_rows"] or "-")]
        for row in facts["defaults"]
    ]
    variables = facts["environment"].items()
    return "\n".join(
        [
            *_versions_text(facts["versions"]),
            "devices",
            *(f"  {device['device']}: {_device_text(device)}" for device in facts["devices"]),
            "native kernels for the CPU",
            f"  {', '.join(facts['native_isas']) or 'not built'}",
            *_backends_text(facts["backends"]),
            f"defaults, at a vocabulary of {facts['example_vocabulary']:,}",
            *aligned([["", "backend", "rows of a tile"], *defaults]),
            *(f"  {reason}" for reason in _reasons(facts["defaults"])),
            "environment",
            *(f"  {name}={value}" for name, value in variables if value is not None),
            *(["  nothing set"] if all(value is None for _, value in variables) else []),
        ]
    )


def _device_text(device: dict[str, Any]) -> str:
    threads = f", {device['threads']} threads" if "threads" in device else ""
    return (
        f"{device['name']}, {in_units(device['memory_bytes'])}, "
        f"capability {device['capability']}{threads}"
    )


def _reasons(defaults: list[dict[str, Any]]) -> list[str]:
    """Say why nothing runs, where nothing does."""
    failed = (reason for row in defaults if row["backend"] is None for reason in row["reasons"])
    return list(dict.fromkeys(failed))


def _versions_text(versions: dict[str, str | None]) -> list[str]:
    rows = [[f"  {name}", version or "-"] for name, version in versions.items()]
    return ["versions", *aligned(rows)]


def _backends_text(backends: dict[str, str | None]) -> list[str]:
    lines = [f"  {name}: {reason or 'available'}" for name, reason in backends.items()]
    return ["backends", *lines]


def _check(arguments: argparse.Namespace) -> int:
    print(*_versions_text(machine.versions()), sep="\n")
    print(_LINE.format("backend", "device", "dtype", "what", "error", "allowed", ""))
    done = []
    for outcome in outcomes():
        done.append(outcome)
        print(_outcome_text(outcome), flush=True)  # at once: the next one may crash
    print(*_backends_text(machine.unavailable_backends()), sep="\n")
    failed = [outcome for outcome in done if not outcome.ok]
    print(f"{len(done)} checks, {len(failed)} failed")
    print(*map(_outcome_text, failed), sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


def _doctor(arguments: argparse.Namespace) -> int:
    for adapter, host in HOSTS.items():
        tested = f"{host.package}, tested with {', '.join(host.tested)}"
        print(f"{adapter}: {machine.installed_version(host.package) or 'not installed'} ({tested})")
    return 0


_LINE = "{:<10} {:<6} {:<8} {:<39} {:>8} {:>8}  {}"


def _outcome_text(outcome: Outcome) -> str:
    values = [f"{outcome.error:.1e}", f"{outcome.allowed:.1e}", "ok" if outcome.ok else "FAILED"]
    if outcome.failure is not None:
        values = ["-", "-", f"FAILED: {outcome.failure}"]
    return _LINE.format(outcome.backend, outcome.device, outcome.dtype, outcome.what, *values)


if __name__ == "__main__":
    raise SystemExit(main())
