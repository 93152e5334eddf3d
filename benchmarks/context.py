"""Finds in the results what a marker names."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.derive import Figures, figures
from benchmarks.load import Device, Environment, Table


class NotMeasuredError(LookupError):
    """No result file holds what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a generator draws on."""

    devices: dict[str, Device]
    results: str  # the folder of the results, as links in the document name it

    def device(self, name: str) -> Device:
        """By folder, or the newest of the kind "cpu" or "cuda"."""
        if name in self.devices:
            return self.devices[name]
        found = [device for device in self.devices.values() if device.environment.kind == name]
        if not found:
            raise NotMeasuredError(name)
        return max(found, key=lambda device: device.environment.date)

    def cases(self, device: str) -> list[Table]:
        """At least one."""
        if not (tables := self.device(device).tables):
            raise NotMeasuredError(device)
        return tables

    def tables(self, device: str, work: str, model: str, tokens: str) -> list[Table]:
        """One case in every dtype; at least one. ``tokens``: a number, or "most"."""
        found = [t for t in self.cases(device) if (t.work, t.model) == (work, model)]
        most = max((table.tokens for table in found), default=0)
        count = most if tokens == "most" else int(tokens)
        if not (found := [table for table in found if table.tokens == count]):
            raise NotMeasuredError(f"{device} {work} {model} {tokens}")
        return found

    def figures(
        self, device: str, work: str, model: str, tokens: str, dtype: str, provider: str
    ) -> Figures:
        for table in self.tables(device, work, model, tokens):
            if table.dtype == dtype and provider in (rows := figures(table)):
                return rows[provider]
        raise NotMeasuredError(provider)


def where(environment: Environment) -> str:
    """The device, with what makes it that fast."""
    if environment.kind == "cuda":
        return environment.device
    return f"{environment.device}, {threads(environment)}"


def threads(environment: Environment) -> str:
    return f"{environment.threads} thread{'' if environment.threads == 1 else 's'}"
