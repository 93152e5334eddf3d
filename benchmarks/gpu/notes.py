"""What a part of the job finds: printed at once, and added to one file that all parts share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import describe, device_is_lost, free

FILE = "gpu-parts.jsonl"  # one for all parts: a remote machine may hand back a few files only


@dataclass(kw_only=True)
class Notes:
    """What one part has found so far."""

    part: str
    out: Path
    device: torch.device
    checks: int = 0
    failed: int = 0

    def check(self, name: str, ok: bool, expected: str, came: str) -> bool:
        """Note a check; a failure is counted, and stops nothing."""
        self.checks += 1
        self.failed += not ok
        word = "ok    " if ok else "FAILED"  # as pytest begins such a line
        print(f"{word} {name}: expected {expected}, got {came}", flush=True)
        self._keep(name, ok=ok, expected=expected, came=came)
        return ok

    def check_equal(self, name: str, expected: Tensor, came: Tensor) -> bool:
        """Check that two tensors have the same bits; NaNs are equal to themselves."""
        same = torch.equal(bits_of(expected), bits_of(came))
        got = "the same" if same else _difference(expected, came)
        return self.check(name, same, "the same bits", got)

    def number(self, name: str, **values: Any) -> None:
        """Note what was measured."""
        shown = "  ".join(f"{key} {_short(value)}" for key, value in values.items())
        print(f"       {name}: {shown}", flush=True)
        self._keep(name, **values)

    def headline(self, text: str) -> None:
        """Note what belongs on the last screen."""
        print(f"* {text}", flush=True)
        self._keep("headline", text=text)

    def every(self, cases: Iterable[tuple[str, Callable[[], object]]]) -> None:
        """Run all cases; one that raises has failed, and the next begins."""
        for name, case in cases:
            try:
                case()
            except Exception as error:  # a kernel that does not compile is a result, too
                self.check(name, False, "a result", describe(error))
            if device_is_lost(self.device.type):
                raise RuntimeError(f"{name} broke the device, and nothing more can run on it")
            free(self.device.type)

    def _keep(self, name: str, **values: Any) -> None:
        line = json.dumps({"part": self.part, "name": name, **values}, default=str)
        with (self.out / FILE).open("a") as file:
            file.write(f"{line}\n")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """Return the bits as integers, which are equal where NaNs are."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _difference(expected: Tensor, came: Tensor) -> str:
    if expected.shape != came.shape:
        return f"shape {tuple(came.shape)} for {tuple(expected.shape)}"
    differ = bits_of(expected) != bits_of(came)
    apart = (came[differ].double() - expected[differ].double()).abs().max().item()
    first = tuple(differ.nonzero()[0].tolist())
    return f"{int(differ.sum())} of {differ.numel()} that differ, by up to {apart:.1e}, at {first}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
