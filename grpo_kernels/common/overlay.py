"""Mixins put above an existing object's class, to change what it does.

The object stays the same object. A method acts on the object that it is called on, so copies,
pickles, and code that wraps and unwraps a forward work. A function set on an object would act on
that object in all of its copies.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


class ForwardOverlay:
    """Base class of such mixins for modules: ``super()`` is the module's own class.

    The module's class keeps its name, and its forward keeps its signature.
    """

    forward: Any
    _prefix = ""  # of the class name

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        layers = _layers(type(self))
        if len(layers) == 1:  # subclassed by another library, such as FSDP2
            return reduced
        return (_make_empty, layers, *reduced[2:])


def apply_overlay(overlay: type[ForwardOverlay], module: Any) -> None:
    """Put ``overlay`` above the class of ``module``; doing it twice is harmless."""
    if not isinstance(module, overlay):
        module.__class__ = _combine(type(module), overlay)  # type: ignore[arg-type]


def remove_overlay(overlay: type[ForwardOverlay], module: Any) -> bool:
    """Undo :func:`apply_overlay`; return False if another class is above that overlay."""
    is_top = _layers(type(module))[-1] is overlay
    if is_top:
        module.__class__ = type(module).__bases__[1]
    return is_top


def _layers(cls: type) -> tuple[Any, ...]:
    """Return the module's own class and the overlays on it, from the bottom."""
    return vars(cls).get("_layers", (cls,))


@functools.cache
def _combine(base: Any, overlay: type[ForwardOverlay]) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return overlay.forward(self, *args, **kwargs)

    # no `__wrapped__`: accelerate would follow it, and restore the forward below
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    members = {
        "__qualname__": base.__qualname__,
        "__module__": base.__module__,
        "forward": forward,
        "_layers": (*_layers(base), overlay),
    }
    return type(f"{overlay._prefix}{base.__name__}", (overlay, base), members)


def _make_empty(*layers: Any) -> Any:
    """Return an object without state, for copies and pickles."""
    return object.__new__(functools.reduce(_combine, layers))
