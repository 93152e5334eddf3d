"""Classes that are laid over the class of an object that exists, to change what it does.

The object stays the same one. A method acts on whatever it is called on, so copies, pickles and
those that wrap and unwrap a forward are right; a function set on an object would act on that object
in all of its copies.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


class Overlay:
    """Base of such classes; their ``super()`` is the object's own class."""

    @classmethod
    def members_over(cls, below: type) -> dict[str, Any]:
        """Return name and further members of the class over ``below``."""
        return {"__name__": f"Fused{below.__name__}"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        found: Any = super().__reduce_ex__(protocol)
        layers = _layers(type(self))
        # one is somebody's subclass, such as FSDP2's
        return found if len(layers) == 1 else (_bare, layers, *found[2:])


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
        it.__class__ = _made((*_layers(type(it)), overlay))


def take_off(overlay: type[Overlay], it: Any) -> bool:
    """Undo :func:`lay_over`; return whether it could: another class may lie over that."""
    *below, top = _layers(type(it))
    if top is overlay:
        it.__class__ = _made(tuple(below))
    return top is overlay


def _layers(cls: type) -> tuple[Any, ...]:
    """Return the object's own class and the overlays on it, from the bottom."""
    return vars(cls).get("_layers", (cls,))


@functools.cache
def _made(layers: tuple[Any, ...]) -> Any:
    *below, overlay = layers
    if not below:
        return overlay  # the object's own class
    under = _made(tuple(below))
    members = overlay.members_over(under) | {"_layers": layers}
    return type(members.pop("__name__"), (overlay, under), members)


def _bare(*layers: type) -> Any:
    """Make an object that has no state yet, for copies and pickles."""
    return object.__new__(_made(layers))
