"""Puts ours in the place of a host's functions while it is on, and theirs back again."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Host:
    """A package that hooks were written for, and the versions that they were tested with."""

    package: str  # as pip knows it
    tested: tuple[str, ...]  # the first numbers of versions: "1.16" stands for every 1.16.x

    def check(self, any_version: bool) -> None:
        """Raise ImportError unless it is here, in a tested version or with ``any_version``."""
        wanted = f"{self.package}: expected version {' or '.join(self.tested)}"
        try:
            found = version(self.package)
        except PackageNotFoundError:
            raise ImportError(f"{wanted}, but it is not installed") from None
        tested = any(f"{found}.".startswith(f"{each}.") for each in self.tested)
        if not tested and not any_version:
            raise ImportError(f"{wanted}, got {found}; any_version=True tries it with this one")


# by adapter; of those that score logits which are not formed, by host
HOSTS = {
    "trl": Host("trl", ("1.16",)),
    "verl": Host("verl", ("0.9",)),
    "torchtitan": Host("torchtitan", ("0.3",)),
    "liger": Host("liger-kernel", ("0.8.1", "0.8.5")),
    "axolotl": Host("axolotl", ("0.19",)),
    "ms_swift": Host("ms-swift", ("4.6",)),
    "lazy_scorers, trl": Host("trl", ("0.29", "1.9")),  # ms-swift has the older one
    "lazy_scorers, openrlhf": Host("openrlhf", ("0.11",)),
    "lazy_scorers, skyrl": Host("skyrl", ("0.3",)),
}


class Replacement(NamedTuple):
    """What stands in for one attribute of a host's module, or of a class in it."""

    owner: Any
    name: str
    ours: Any
    everywhere: bool = False  # also in all modules that have imported it by this name


_OURS: list[Any] = []  # what is in place, of all switches
_LOCK = threading.RLock()  # of all switches


class Switch:
    """Some attributes of a host that are ours while it is on."""

    def __init__(
        self,
        host: Host,
        replacements: Callable[[], Iterable[Replacement]],  # called once the host is there
        too_late: Callable[[], str] = str,  # says what was built already that keeps theirs
    ) -> None:
        self.host, self._replacements, self._too_late = host, replacements, too_late
        self._theirs: list[tuple[Replacement, Any]] = []
        self._blocks = 0  # those of `enabled` that keep it on, in all threads

    @property
    def on(self) -> bool:
        return bool(self._theirs)

    def enable(self, *, any_version: bool = False) -> None:
        """Put ours in place, for all that is built from here on. Doing it twice is harmless.

        Raises:
            ImportError: as :meth:`Host.check`.
            ValueError: it is too late, or another switch has put something there.
        """
        with _LOCK:
            self._put_ours(any_version, self._too_late)

    def _put_ours(self, any_version: bool, too_late: Callable[[], str] = str) -> None:
        if self.on:
            return
        self.host.check(any_version)
        if wrong := too_late():
            raise ValueError(
                f"enable: {wrong}; build trainers after enable(), and delete those that are there"
            )
        found = [(each, getattr(each.owner, each.name)) for each in self._replacements()]
        for each, theirs in found:
            if theirs in _OURS:
                raise ValueError(
                    f"{self.host.package}: {each.name} has been replaced already, by another switch"
                )
        self._theirs = found
        for each, theirs in found:
            _OURS.append(each.ours)
            _put(each, theirs, each.ours)

    def disable(self) -> None:
        """Put theirs back; raise ValueError where somebody else has replaced ours meanwhile."""
        with _LOCK:
            for each, _ in self._theirs:
                if (found := getattr(each.owner, each.name)) is not each.ours:
                    raise ValueError(
                        f"{self.host.package}: expected {each.name} as enable() has left it, got "
                        f"{found!r}; undo what has replaced it first"
                    )
            while self._theirs:
                each, theirs = self._theirs.pop()
                _OURS.remove(each.ours)
                _put(each, each.ours, theirs)

    @contextmanager
    def enabled(self, *, any_version: bool = False) -> Iterator[None]:
        """Have ours in place within a ``with``, in threads until the last one ends.

        One that is on already stays on.
        """
        with _LOCK:
            keeps_on = not self.on or self._blocks > 0
            self._put_ours(any_version)
            self._blocks += keeps_on
        try:
            yield
        finally:
            with _LOCK:
                self._blocks -= keeps_on
                if keeps_on and not self._blocks:
                    self.disable()


def claim(model: Any, adapter: str) -> None:
    """Note that an adapter changes a model; raise ValueError where another one has changed it."""
    first = vars(model).setdefault("_grpo_adapter", adapter)
    if first != adapter:
        raise ValueError(
            f"model: expected one for {adapter} alone, got one that {first} has changed already; "
            "load the model again"
        )


def release(model: Any) -> None:
    """Take back :func:`claim`, by the adapter that has undone its changes."""
    del vars(model)["_grpo_adapter"]


def alive(cls: type) -> list[Any]:
    """Return the objects of a class that exist, for hooks that are too late for these."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]


def _put(place: Replacement, old: Any, new: Any) -> None:
    setattr(place.owner, place.name, new)
    own = getattr(place.ours, "__module__", None)  # where ours is defined, by the same name
    for name, module in list(sys.modules.items()) if place.everywhere else ():
        found = getattr(module, "__dict__", {}).get(place.name)
        if found is old and name != own and name.split(".")[0] != __name__.split(".")[0]:
            setattr(module, place.name, new)
