"""Small helpers that every package uses: printable text, options, imports by path, threads.

It imports no other package and nothing heavy, because a server imports it together with the guard.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import ipaddress
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Text that is safe to print.

# control characters except newline and tab, marks that change the writing direction, half pairs
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Return ``value`` as None, numbers, text, lists and dictionaries, or else as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # of numpy or torch
        return plain(value.tolist())
    return encodable(str(value))


def encodable(text: str) -> str:
    """Return ``text`` with halves of surrogate pairs escaped: UTF-8 cannot hold them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    r"""Return ``text`` with its control characters written out, as in ``\x1b[2J``.

    A terminal would obey them: clear itself, rename its window, fill the clipboard.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(value: Any, characters: int = 200) -> str:
    """Return a ``repr`` that is short enough for a message: a prompt may be a whole book."""
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."


def message_of(error: BaseException) -> str:
    """Return the message of another library's error, or its type if its ``__str__`` raises."""
    try:
        return str(error)
    except BaseException:
        return type(error).__name__


# other versions' and tools' names for an argument, if they are not similar
_ALSO_CALLED = {
    "config_name": "dataset_config",
    "dataset": "dataset_name",
    "dataset_split": "dataset_train_split",
    "model": "model_name_or_path",
    "no_cuda": "use_cpu",
    "revision": "model_revision",
    "split": "dataset_train_split",
    "torch_dtype": "dtype",
    "vllm_dtype": "vllm_engine_kwargs",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


def hint(name: str, known: Collection[str]) -> str:
    """Return a hint at the one of ``known`` that ``name`` probably means; empty if there is
    none."""
    other = _ALSO_CALLED.get(name)
    found = [other] if other in known else difflib.get_close_matches(name, known, n=1)
    return f" (is it {found[0]}?)" if found else ""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine, at an address that no other machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# Dataclass fields for a parser.


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field that a parser describes by ``text``; a percent sign is ``%%``."""
    return field(default=default, metadata={"help": text, **metadata})


# The user's modules, and the functions that an import path names.


def load_module(name: str, argument: str) -> ModuleType:
    """Import the module ``name``.

    Raises:
        ValueError: it cannot be imported, whatever its code raises. The message begins with
            ``argument``.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # it runs the user's code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(frame.filename)  # not a file if the module is missing
        where = f" ({file.name}, line {frame.lineno})" if file.is_file() else ""
        raise ValueError(
            f"{argument}: module {name!r} cannot be imported: {type(error).__name__}: "
            f"{message_of(error)}{where}{_not_here(error, name)}"
        ) from error


def _not_here(error: BaseException, name: str) -> str:
    """Say where a missing module was searched for, and name a similar one."""
    top = name.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != top:
        return ""
    here = Path.cwd()
    if not {"", str(here)}.intersection(sys.path):
        return ""
    modules = [path.stem for path in here.glob("*.py")]
    modules += [path.parent.name for path in here.glob("*/__init__.py")]
    return f"; it isn't in the working directory {str(here)!r} either{hint(top, modules)}"


def load_function(path: str, argument: str) -> Callable[..., Any]:
    """Import the function that ``package.module.function`` names.

    Raises:
        ValueError: the path is invalid, or does not lead to a callable. The message begins with
            ``argument``.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name or path.startswith(".") or path.endswith(".py"):
        raise ValueError(f"{argument}: expected package.module.function, got {path!r}")
    module = load_module(module_name, argument)
    if not hasattr(module, attribute):
        meant = hint(attribute, list(vars(module)))
        raise ValueError(f"{argument}: module {module_name!r} has no {attribute!r}{meant}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(
            f"{argument}: expected {path!r} to be callable, got {type(function).__name__}"
        )
    return function


# Complete files, work that may fail, and work outside the main thread.


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on leaving, the file replaces ``path`` atomically."""
    aside = path.with_name(f"incomplete-{path.name}")
    yield aside
    aside.replace(path)


_warned: set[tuple[str, type]] = set()


@contextmanager
def unfailing(what: str) -> Iterator[None]:
    """Continue after any error inside, with one warning per kind of error.

    Nothing inside may wait for other processes: a process that fails would never arrive.

    Args:
        what: names what is then missing, with the folder of the run.
    """
    try:
        yield
    except Exception as error:
        kind = (what, type(error))
        if kind not in _warned:
            _warned.add(kind)
            logger.warning(
                "%s: the run continues without it: %s: %s", what, kind[1].__name__, error
            )


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call ``work`` at once, on its own thread."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a thread cannot be stopped: cancel() does nothing

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again when the result is read
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


_BACKGROUND = "rollouts"  # the name of the background threads


async def in_background(work: Callable[[], T]) -> T:
    """Call ``work``, which may be slow, on its own thread.

    Raises:
        RuntimeError: ``work`` raised something like SystemExit, which would end the event loop.
    """

    def checked() -> T:
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:
            said = f"{type(error).__name__}: {message_of(error)}"
            raise RuntimeError(
                f"expected an Exception from code that runs ahead, got {said}"
            ) from error

    return await asyncio.wrap_future(in_thread(checked, _BACKGROUND))


def is_in_background() -> bool:
    """Return whether this runs on a thread of :func:`in_background`."""
    return threading.current_thread().name == _BACKGROUND


def start(coroutines: list[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """Run the coroutines together. The first failure, or canceling the future, cancels all."""
    if not coroutines:
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing
    return asyncio.run_coroutine_threadsafe(together(coroutines), _loop(os.getpid()))


async def together(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run the coroutines at the same time. The first failure cancels all."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of process ``pid``: a fork inherits it, but not its thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop
