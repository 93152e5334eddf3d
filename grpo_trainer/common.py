"""Small things that any room may use: texts that may be shown, options, imports by path, work
beside.

It imports no room, and nothing heavy: a server imports it beside the guard.
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

# Texts that may be shown.

# control characters but newline and tab, what turns the direction of writing around, half pairs
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Return ``value`` as None, numbers, text, lists and dictionaries, or else its text."""
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
    """Return ``text`` with escapes for halves of a surrogate pair: UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    r"""Return ``text`` with its control characters written out, as in ``\x1b[2J``.

    A terminal would obey them: clear itself, rename its window, fill the clipboard.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(value: Any, characters: int = 200) -> str:
    """Return ``repr`` for a message: a prompt may be a whole book."""
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."


def message_of(error: BaseException) -> str:
    """Return what an error of other code says, or its type if its ``__str__`` raises, too."""
    try:
        return str(error)
    except BaseException:
        return type(error).__name__


# what other versions and tools call an argument, where its name is not alike
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
    """Return a remark on the one of ``known`` that ``name`` stands for; empty if none does."""
    other = _ALSO_CALLED.get(name)
    found = [other] if other in known else difflib.get_close_matches(name, known, n=1)
    return f" (is it {found[0]}?)" if found else ""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine and cannot be reached from another one."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# Fields of dataclasses that a parser reads.


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field that a parser describes by ``text``; a percent sign is ``%%``."""
    return field(default=default, metadata={"help": text, **metadata})


# Modules of the user's, and the functions in them that an import path names.


def load_module(name: str, argument: str) -> ModuleType:
    """Import the module ``name``.

    Raises:
        ValueError: it cannot be imported, whatever its own code raises. The message begins with
            ``argument``.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # it runs the user's code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(frame.filename)  # none in the import machinery, as for a missing module
        where = f" ({file.name}, line {frame.lineno})" if file.is_file() else ""
        raise ValueError(
            f"{argument}: module {name!r} cannot be imported: {type(error).__name__}: "
            f"{message_of(error)}{where}{_not_here(error, name)}"
        ) from error


def _not_here(error: BaseException, name: str) -> str:
    """Say where a module was searched that is not there, and which one there is like it."""
    top = name.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != top:
        return ""
    here = Path.cwd()
    if not {"", str(here)}.intersection(sys.path):
        return ""
    modules = [path.stem for path in here.glob("*.py")]
    modules += [path.parent.name for path in here.glob("*/__init__.py")]
    return f"; nor is it in the working directory {str(here)!r}{hint(top, modules)}"


def load_function(path: str, argument: str) -> Callable[..., Any]:
    """Import what ``package.module.function`` names.

    Raises:
        ValueError: that is no such path, or leads to nothing that can be called. The message begins
            with ``argument``.
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


# Files that are whole, work that may fail, and work beside the main thread.


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield where to write what then takes the place of ``path``, at once."""
    aside = path.with_name(f"incomplete-{path.name}")
    yield aside
    aside.replace(path)


_warned: set[tuple[str, type]] = set()


@contextmanager
def unfailing(what: str) -> Iterator[None]:
    """Go on after any error inside, with one warning for each kind of them.

    Nothing inside may wait for other processes: one that fails would not come.

    Args:
        what: what is missing then, with the folder of the run.
    """
    try:
        yield
    except Exception as error:
        kind = (what, type(error))
        if kind not in _warned:
            _warned.add(kind)
            logger.warning("%s: the run goes on without: %s: %s", what, kind[1].__name__, error)


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call ``work`` at once, on a thread of its own."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a thread cannot be stopped: cancel() does nothing

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


_BACKGROUND = "rollouts"  # the name of its threads


async def in_background(work: Callable[[], T]) -> T:
    """Call ``work``, which may take long, on a thread of its own.

    Raises:
        RuntimeError: ``work`` raised something like SystemExit, which would end the loop of all
            coroutines.
    """

    def checked() -> T:
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:
            said = f"{type(error).__name__}: {message_of(error)}"
            raise RuntimeError(f"expected an Exception of what runs ahead, got {said}") from error

    return await asyncio.wrap_future(in_thread(checked, _BACKGROUND))


def is_in_background() -> bool:
    """Return whether this runs on a thread of :func:`in_background`."""
    return threading.current_thread().name == _BACKGROUND


def start(coroutines: list[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """Run them together. The first failure, or cancelling the future, cancels all."""
    if not coroutines:
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing
    return asyncio.run_coroutine_threadsafe(together(coroutines), _loop(os.getpid()))


async def together(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run them at the same time. The first failure cancels all."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the loop of process ``pid``: a fork inherits it, but not the thread that runs it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop
