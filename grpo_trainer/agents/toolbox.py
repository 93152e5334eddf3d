"""Tools: what a model may call, and the calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from PIL import Image
from transformers.utils import get_json_schema

from grpo_trainer.common import encodable, in_thread, start
from grpo_trainer.data import Media, image_source


class Tool(NamedTuple):
    """A function that the model can call."""

    function: Callable[..., Any]
    schema: dict[str, Any]  # JSON schema, as chat templates take it


Toolbox = dict[str, Tool]  # by name

_BLOCKS = ("text", "image")  # that a tool may return


def make_toolbox(functions: Iterable[Callable[..., Any]], argument: str = "tools") -> Toolbox:
    """Return the functions as tools.

    Args:
        functions: plain or ``async`` functions or methods with type hints and a docstring that
            describes each argument, in Google's style.
        argument: whose name errors begin with.

    Raises:
        ValueError: one is no function, lacks a hint or a description, or has another one's name.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise ValueError(f"{argument}: expected a list of functions, got {functions!r}")
    toolbox: Toolbox = {}
    for function in functions:
        if not inspect.isfunction(function) and not inspect.ismethod(function):
            raise ValueError(f"{argument}: expected functions or methods, got {function!r}")
        name = function.__name__
        if name in toolbox:
            raise ValueError(f"{argument}: expected different names, got {name!r} twice")
        try:
            toolbox[name] = Tool(function, get_json_schema(function))
        except Exception as error:  # transformers raises three kinds, typing a NameError
            raise ValueError(
                f"{argument}: expected type hints for all arguments of {name!r} and a docstring "
                f"with an `Args:` section that describes them: {error}"
            ) from error
    return toolbox


def schemas(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return what a chat template shows of the tools."""
    return [tool.schema for tool in toolbox.values()]


class Call(NamedTuple):
    """What the model asked for."""

    name: str
    arguments: dict[str, Any]
    tool: Tool | None  # None: there is none of that name


class Outcome(NamedTuple):
    """What the model gets."""

    parts: list[str | Image.Image]
    failed: bool = False
    timed_out: bool = False


class ToolRunner:
    """Runs tools. First the plain functions, in order, then the ``async`` ones, all together.

    With a time limit, plain functions run in threads of their own. One that takes too long cannot
    be stopped: its thread is left behind. Without a limit they run in the caller's thread.

    Args:
        media: where the images may come from that tools return.
        places: texts of tokens that stand for images: the model would look for one.
        timeout: seconds for a call; None: any number.
    """

    def __init__(
        self, media: Media, places: Collection[str] = (), timeout: float | None = None
    ) -> None:
        self._media = media
        self._places = places
        self._timeout = timeout

    def run(self, calls: list[Call]) -> list[Outcome]:
        """Answer each call. A tool that raises or takes too long answers with its error."""
        outcomes: dict[int, Outcome] = {}
        later: dict[int, Callable[[], Any]] = {}
        for index, (name, arguments, tool) in enumerate(calls):
            if tool is None:
                outcomes[index] = _failed(f"Tool {name} not found.")
            elif inspect.iscoroutinefunction(tool.function):
                later[index] = partial(tool.function, **arguments)
            else:
                outcomes[index] = self._run(partial(tool.function, **arguments))
        together = start([self._await(function) for function in later.values()]).result()
        outcomes |= zip(later, together, strict=True)
        return [self._without_places(outcomes[index]) for index in range(len(calls))]

    def _without_places(self, outcome: Outcome) -> Outcome:
        texts = [part for part in outcome.parts if isinstance(part, str)]
        if any(place in text for place in self._places for text in texts):
            return _failed("The answer has a token that stands for an image.")
        return outcome

    def _run(self, function: Callable[[], Any]) -> Outcome:
        if self._timeout is None:
            return self._answer(function)
        try:
            return in_thread(partial(self._answer, function), "tool").result(self._timeout)
        except TimeoutError:
            return self._too_late()

    def _answer(self, function: Callable[[], Any]) -> Outcome:
        try:
            return Outcome(_parts(function(), self._media))
        except BaseException as error:  # a tool may run code that the model wrote
            in_main_thread = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt) and in_main_thread:  # Ctrl-C
                raise
            return _failed(error)

    async def _await(self, function: Callable[[], Any]) -> Outcome:
        task = asyncio.ensure_future(self._answer_async(function))
        done, _ = await asyncio.wait([task], timeout=self._timeout)
        if done:
            return task.result()
        task.cancel()
        return self._too_late()

    async def _answer_async(self, function: Callable[[], Any]) -> Outcome:
        try:
            return Outcome(_parts(await function(), self._media))
        except BaseException as error:  # what leaves a task would end the loop of all of them
            return _failed(error)

    def _too_late(self) -> Outcome:
        return _failed(f"No answer within {self._timeout:g} seconds.")._replace(timed_out=True)


def _parts(value: Any, media: Media) -> list[str | Image.Image]:
    """Return an image, the parts of a message's content if it is one, or else the text."""
    if isinstance(value, Image.Image):
        return [media.open(value)]
    parts = value if isinstance(value, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if not kinds or any(kind not in _BLOCKS for kind in kinds):
        return [encodable(str(value))]
    return [
        media.open(image_source(part))
        if part["type"] == "image"
        else encodable(str(part.get("text") or ""))
        for part in parts
    ]


def _failed(error: Any) -> Outcome:
    try:
        text = str(error)
    except BaseException:  # its own method may do anything
        text = type(error).__name__
    return Outcome([str({"error": text})], failed=True)
