"""Hosts that are on no package index: stand-ins with their interfaces, or checkouts of them.

A stand-in has the paths, names and signatures of the host's own modules and computes with full
logits. Where ``GRPO_KERNELS_HOSTS`` names a folder that holds checkouts (``prime-rl``, ``NeMo-RL``
or ``nemo-rl``, ``SkyRL``), the same cases run with the real modules as well: their own files, with
empty modules in place of what these import and the cases do not reach.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_kernels.integrations import probe

FOLDER = os.environ.get("GRPO_KERNELS_HOSTS")
STAND_IN, REAL = "stand-in", "real"


@dataclass(frozen=True)
class Host:
    """What the tests know of a host."""

    package: str  # as pip knows it
    version: str
    folders: tuple[str, ...]  # names of a checkout
    source: str  # where in a checkout its packages lie
    stand_in: Callable[[], Mapping[str, Mapping[str, Any]]]  # module: its names
    unreached: tuple[str, ...] = ()  # modules that a checkout imports and no case reaches

    @property
    def checkout(self) -> Path | None:
        """Where its packages lie; None: nowhere."""
        found = [Path(FOLDER) / name / self.source for name in self.folders if FOLDER]
        return next((path for path in found if path.is_dir()), None)

    @property
    def kinds(self) -> list[Any]:
        """Return the parameters of a test: the stand-in, and the real one or why it is left out."""
        where = "GRPO_KERNELS_HOSTS is not set" if FOLDER is None else f"none of it is in {FOLDER}"
        reason = f"{self.package} itself was not tested, only its interface: {where}"
        missing = pytest.mark.skipif(self.checkout is None, reason=reason)
        return [pytest.param(STAND_IN), pytest.param(REAL, marks=missing)]

    @contextmanager
    def present(self, kind: str) -> Iterator[dict[str, ModuleType]]:
        """Have the host imported within a ``with``, and return its modules by their last name."""
        before, theirs = dict(sys.modules), self.stand_in()
        asked = probe.version
        probe.version = lambda name: self.version if name == self.package else version(name)
        try:
            self._put_parents(theirs)
            if kind == STAND_IN:
                for name, contents in theirs.items():
                    made = ModuleType(name)
                    vars(made).update(contents)
                    for value in contents.values():
                        value.__module__ = name
                    sys.modules[name] = made
            else:
                sys.modules.update({name: _Unreached(name) for name in self.unreached})
            yield {name.rpartition(".")[2]: import_module(name) for name in theirs}
        finally:
            probe.version = asked
            own = {name.partition(".")[0] for name in (*theirs, *self.unreached)}
            for name in [name for name in sys.modules if name.partition(".")[0] in own]:
                del sys.modules[name]
            sys.modules.update(before)

    def with_it(self, kind: str, cases: Mapping[str, Callable[[], None]]) -> dict[str, Any]:
        """Return the cases, each with the host imported."""

        def run(case: Callable[[], None]) -> None:
            with self.present(kind):
                case()

        return {name: partial(run, case) for name, case in cases.items()}

    def _put_parents(self, names: Mapping[str, Any]) -> None:
        """Import no ``__init__`` of the host: they import more than the cases reach."""
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts)):
                parent = ModuleType(".".join(parts[:end]))
                root = self.checkout or Path("nowhere")
                parent.__path__ = [str(root.joinpath(*parts[:end]))]
                sys.modules[parent.__name__] = parent


class _AnyClass(type):
    """Class of what is imported and not reached: a decorator, an annotation, a switch that is off.

    Called with a function it gives that back.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False


class _Any(metaclass=_AnyClass):
    pass


class _Unreached(ModuleType):
    """A module of which everything can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any
