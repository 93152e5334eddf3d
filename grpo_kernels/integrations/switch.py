"""Replaces functions of a trainer by ours, and restores them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_kernels.integrations.probe import LOCK, Probe, Replacement, find, missing


class _Place(NamedTuple):
    """An attribute of a trainer, its original value, and our replacement."""

    owner: Any
    name: str
    theirs: Any
    ours: Any
    everywhere: bool


_OURS: list[Any] = []  # the active replacements of all switches


class Switch:
    """Replaces some attributes of a trainer by ours while it is on."""

    def __init__(
        self,
        probe: Probe,
        too_late: Callable[[], str] = str,  # names existing objects that would keep theirs
    ) -> None:
        self.probe = probe
        self._too_late = too_late
        self._places: list[_Place] = []  # the active replacements
        self._blocks = 0  # active `enabled` blocks, in all threads

    @property
    def on(self) -> bool:
        return bool(self._places)

    def enable(self, *, any_version: bool = False) -> None:
        """Activate our functions for everything built afterwards. Calling it twice is harmless.

        Raises:
            ImportError: as for :meth:`Probe.check`. With ``any_version``, functions that the
                trainer lacks are skipped; if it lacks all of them, that is an error.
            ValueError: it is too late, or another switch has replaced the same functions.
        """
        with LOCK:
            self._put_ours(any_version, self._too_late)

    def check(self, any_version: bool = False) -> None:
        """Raise ImportError as :meth:`enable` would, unless the switch is on."""
        if not self.on:
            self.probe.check(any_version)

    def _put_ours(self, any_version: bool, too_late: Callable[[], str] = str) -> None:
        if self.on:
            return
        package = self.probe.host.package
        self.probe.host.installed()
        places = [place for each in self.probe.replacements() if (place := _place(each))]
        for place in places:
            if place.theirs in _OURS:
                raise ValueError(
                    f"{package}: {place.name} has already been replaced by another switch"
                )
        self.probe.check(any_version)
        if wrong := too_late():
            raise ValueError(
                f"enable: {wrong}; build trainers after enable(), and delete existing ones"
            )
        if not places:
            raise ImportError(f"{package}: found nothing in it that we could replace")
        self._places = places
        for place in places:
            _OURS.append(place.ours)
            _put(place, place.theirs, place.ours)

    def disable(self) -> None:
        """Restore the trainer's functions; raise ValueError if other code has replaced ours."""
        with LOCK:
            for place in self._places:
                present = getattr(place.owner, place.name)
                if present is not place.ours:
                    raise ValueError(
                        f"{self.probe.host.package}: expected {place.name} as enable() left it, "
                        f"got {present!r}; first undo the code that replaced it"
                    )
            while self._places:
                place = self._places.pop()
                _OURS.remove(place.ours)
                _put(place, place.ours, place.theirs)

    @contextmanager
    def enabled(self, *, any_version: bool = False) -> Iterator[None]:
        """Enable within a ``with`` block; with several threads, until the last one leaves it.

        A switch that is already on stays on.
        """
        with LOCK:
            keeps_on = not self.on or self._blocks > 0
            self._put_ours(any_version)
            self._blocks += keeps_on
        try:
            yield
        finally:
            with LOCK:
                self._blocks -= keeps_on
                if keeps_on and not self._blocks:
                    self.disable()


def claim(model: Any, adapter: str) -> None:
    """Record that an adapter changes a model; raise ValueError if another one has changed it."""
    first = vars(model).setdefault("_grpo_adapter", adapter)
    if first != adapter:
        raise ValueError(
            f"model: expected a model that only {adapter} changes, got one that {first} has "
            "changed; load the model again"
        )


def release(model: Any) -> None:
    """Undo :func:`claim`, after the adapter has undone its changes."""
    del vars(model)["_grpo_adapter"]


def alive(cls: type) -> list[Any]:
    """Return the existing objects of a class, for which hooks would be too late."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), cls)]


def _place(replacement: Replacement) -> _Place | None:
    """Return where a replacement goes; None if the trainer has no such attribute."""
    if missing(replacement.place):  # reported by the probe
        return None
    theirs = find(replacement.place)
    return _Place(
        owner=find(replacement.owner),
        name=replacement.name,
        theirs=theirs,
        ours=replacement.ours(theirs) if replacement.wraps else replacement.ours,
        everywhere=replacement.everywhere,
    )


def _put(place: _Place, old: Any, new: Any) -> None:
    setattr(place.owner, place.name, new)
    own = getattr(place.ours, "__module__", None)  # the module that defines ours
    for name, module in list(sys.modules.items()) if place.everywhere else ():
        present = getattr(module, "__dict__", {}).get(place.name)
        if present is old and name != own and name.split(".")[0] != __name__.split(".")[0]:
            setattr(module, place.name, new)
