"""Small things that any room may use: texts that may be shown, options, imports by path, work
beside.

It imports no room, and nothing heavy: a server imports it beside the guard.
"""

from __future__ import annotations

import asyncio
import copy
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
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
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
    "attn_impl": "attn_implementation",
    "config_name": "dataset_config",
    "dataset": "dataset_name",
    "dataset_split": "dataset_train_split",
    "evaluation_strategy": "eval_strategy",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "no_cuda": "use_cpu",
    "revision": "model_revision",
    "reward_model": "reward_model_name_or_path",
    "reward_model_path": "reward_model_name_or_path",
    "split": "dataset_train_split",
    "torch_dtype": "dtype",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_dtype": "vllm_engine_kwargs",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


def hint(name: str, known: Collection[str]) -> str:
    """Return a remark on the one of ``known`` that ``name`` stands for; empty if none does."""
    other = _ALSO_CALLED.get(name)
    found = [other] if other in known else difflib.get_close_matches(name, known, n=1)
    return f" (is it {found[0]}?)" if found else ""


def name_of(word: str) -> str:
    """Return the field that a word of a command line names, as ``lr`` for ``--lr=1``."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def no_such_option(word: str, known: Collection[str]) -> str:
    """Say of a word of a command line that it names none of the ``known`` fields."""
    option = word.partition("=")[0]
    return f"{option}: there is no such argument{hint(name_of(word), known)}"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine and cannot be reached from another one."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# The arguments of ``grpo-train``, as the file has them that ``--help-all`` prints.

HELP = Path(__file__).with_name("help.txt")
# where other packages name options: those of another version are not in the file
_ELSEWHERE = {"transformers": "training_args.py", "accelerate": "commands/launch.py"}


def short_help() -> str:
    """Return the usage and the first two sections of the file: what one needs first."""
    return "".join(re.split(r"^(?=\S.*:$)", HELP.read_text(), flags=re.M)[:3]).rstrip() + "\n"


def descriptions() -> dict[str, str]:
    """Return what the file says of each argument, without the default; mostly no text of others."""
    entries = re.findall(r"^  --(\w+).*?(?:  +(.+))?$((?:\n {24}.+)*)", HELP.read_text(), re.M)
    texts = {name: " ".join(f"{start}{rest}".split()) for name, start, rest in entries}
    return {name: re.sub(r" ?\(default: .*\)$", "", text) for name, text in texts.items()}


def describe_fields(kind: Any) -> None:
    """Give the fields of a dataclass the texts of the file, which a parser shows."""
    for name, text in descriptions().items():
        if text and name in kind.__dataclass_fields__:
            field = copy.copy(kind.__dataclass_fields__[name])  # a base class may share it
            field.metadata = {**field.metadata, "help": text.replace("%", "%%")}
            kind.__dataclass_fields__[name] = field


def check_options(words: Sequence[str]) -> None:
    """Raise ValueError if one of the words of a command line looks like an option and is none.

    It imports none of the trainer, which takes seconds.
    """
    known = descriptions()
    # words with a space are values to argparse
    for word in (word for word in words if re.match(r"--\S+$", word)):
        name = name_of(word)
        if not any(_exists(each, known) for each in (name, name.removeprefix("no_"))):
            raise ValueError(no_such_option(word, known))


def _exists(name: str, known: dict[str, str]) -> bool:
    option = re.compile(rf'^    {re.escape(name)}:|"--{re.escape(name)}"', re.M)
    return name in known or any(option.search(_source(*place)) for place in _ELSEWHERE.items())


def _source(package: str, file: str) -> str:
    spec = find_spec(package)  # imports nothing
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0], file).read_text() if folders else ""


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
