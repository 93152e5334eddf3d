"""Classes that are laid over the class of an object that exists, to change what it does.

The object stays the same one. A method acts on whatever it is called on, so copies, pickles and
those that wrap and unwrap a forward are right; a function set on an object would act on that object
in all of its copies.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


class ForwardOverlay:
    """Base of such classes for modules, whose ``super()`` is the object's own class.

    Name and signature, which others look at, stay those of that class and its forward.
    """

    forward: Any
    _prefix = ""  # of the name

    def __reduce_ex__(self, protocol: Any) -> Any:
        found: Any = super().__reduce_ex__(protocol)
        layers = _layers(type(self))
        # one is somebody's subclass, such as FSDP2's
        return found if len(layers) == 1 else (_bare, layers, *found[2:])


def lay_over(overlay: type[ForwardOverlay], it: Any) -> None:
    """Lay ``overlay`` over the class of ``it``; doing it twice is harmless."""
    if not isinstance(it, overlay):
        it.__class__ = _made(type(it), overlay)  # type: ignore[arg-type]


def take_off(overlay: type[ForwardOverlay], it: Any) -> bool:
    """Undo :func:`lay_over`; return whether it could: another class may lie over that."""
    is_top = _layers(type(it))[-1] is overlay
    if is_top:
        _, it.__class__ = type(it).__bases__
    return is_top


def _layers(cls: type) -> tuple[Any, ...]:
    """Return the object's own class and the overlays on it, from the bottom."""
    return vars(cls).get("_layers", (cls,))


@functools.cache
def _made(under: Any, overlay: type[ForwardOverlay]) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return overlay.forward(self, *args, **kwargs)

    # no `__wrapped__`, by which accelerate would find, and put back, the forward below
    forward.__signature__ = inspect.signature(under.forward)  # type: ignore[attr-defined]
    members = {name: getattr(under, name) for name in ("__qualname__", "__module__")}
    members |= {"forward": forward, "_layers": (*_layers(under), overlay)}
    return type(f"{overlay._prefix}{under.__name__}", (overlay, under), members)


def _bare(*layers: Any) -> Any:
    """Make an object that has no state yet, for copies and pickles."""
    return object.__new__(functools.reduce(_made, layers))
