"""Classes that are laid over the class of an object that exists, to change what it does.

The object stays the same one, and nothing in it refers to it: a method acts on whatever it is
called on. So copies, pickles and those that wrap and unwrap a forward are right. A function set on
an object would go on acting on that object in all of its copies.
"""

from __future__ import annotations

import inspect
from typing import Any


class Overlay:
    """Base of such classes; their ``super()`` is the object's own class."""

    @classmethod
    def members_over(cls, below: type) -> dict[str, Any]:
        """Return name and further members of the class over ``below``."""
        return {"__name__": f"Fused{below.__name__}"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        below: type = type(self)
        overlays: list[type[Overlay]] = []
        while (parts := vars(below).get("_laid_over")) is not None:
            overlay, below = parts
            overlays.append(overlay)
        found: Any = super().__reduce_ex__(protocol)
        if not overlays:  # somebody's subclass, such as FSDP2's
            return found
        return _bare, (below, *reversed(overlays)), *found[2:]


class ForwardOverlay(Overlay):
    """An overlay of a model's forward: name and signature, which others look at, stay as before."""

    forward: Any

    @classmethod
    def members_over(cls, below: Any) -> dict[str, Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cls.forward(self, *args, **kwargs)

        # no `__wrapped__`, by which accelerate would find, and put back, the forward below
        forward.__signature__ = inspect.signature(below.forward)  # type: ignore[attr-defined]
        names = {name: getattr(below, name) for name in ("__name__", "__qualname__", "__module__")}
        return {**names, "forward": forward}


def lay_over(overlay: type[Overlay], it: Any) -> None:
    """Lay ``overlay`` over the class of ``it``; doing it twice is harmless."""
    if not isinstance(it, overlay):
        it.__class__ = _made(overlay, type(it))


def take_off(overlay: type[Overlay], it: Any) -> bool:
    """Undo :func:`lay_over`; return whether it could: another class may lie over that."""
    top, below = vars(type(it)).get("_laid_over", (None, None))
    if top is overlay:
        it.__class__ = below
    return top is overlay


_MADE: dict[tuple[type[Overlay], type], Any] = {}


def _made(overlay: type[Overlay], below: type) -> Any:
    parts = overlay, below
    if parts not in _MADE:
        members = overlay.members_over(below) | {"_laid_over": parts}
        _MADE[parts] = type(members.pop("__name__"), parts, members)
    return _MADE[parts]


def _bare(below: type, *overlays: type[Overlay]) -> Any:
    """Make an object that has no state yet, for copies and pickles."""
    for overlay in overlays:
        below = _made(overlay, below)
    return object.__new__(below)
