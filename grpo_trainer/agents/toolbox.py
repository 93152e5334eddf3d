"""Tools: what a model may call, and the calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from PIL import Image
from transformers.utils import get_json_schema

from grpo_trainer.common import encodable, start
from grpo_trainer.data import Media, image_source


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model can call."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]  # JSON schema, as chat templates take it
    is_async: bool


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
        tool = _make_tool(function, argument)
        if tool.name in toolbox:
            raise ValueError(f"{argument}: expected different names, got {tool.name!r} twice")
        toolbox[tool.name] = tool
    return toolbox


def schemas(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return what a chat template shows of the tools."""
    return [tool.schema for tool in toolbox.values()]


def _make_tool(function: Any, argument: str) -> Tool:
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        raise ValueError(f"{argument}: expected functions or methods, got {function!r}")
    name = function.__name__
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers raises three kinds, typing a NameError
        raise ValueError(
            f"{argument}: expected type hints for all arguments of {name!r} and a docstring with "
            f"an `Args:` section that describes them: {error}"
        ) from error
    is_async = inspect.iscoroutinefunction(function)
    return Tool(name=name, function=function, schema=schema, is_async=is_async)


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

    def without(self, tokens: Collection[str]) -> Outcome:
        """Return it, or an error if its text has any of the ``tokens`` that stand for images:
        the model would look for the images."""
        texts = [part for part in self.parts if isinstance(part, str)]
        if any(token in text for token in tokens for text in texts):
            return _failed("The answer has a token that stands for an image.")
        return self


class ToolRunner:
    """Runs tools. First the plain functions, in order, then the ``async`` ones, all together.

    With a time limit, plain functions run in one thread of their own, the same for all calls. One
    that takes too long cannot be stopped: its thread is left behind, and another one goes on.
    Without a limit they run in the caller's thread.

    Args:
        media: where the images may come from that tools return.
        timeout: seconds for a call; None: any number.
    """

    def __init__(self, media: Media, timeout: float | None = None) -> None:
        self._media = media
        self._timeout = timeout
        self._worker: _Worker | None = None

    def run(self, calls: list[Call]) -> list[Outcome]:
        """Answer each call. A tool that raises or takes too long answers with its error."""
        outcomes: dict[int, Outcome] = {}
        awaited: dict[int, Call] = {}
        for index, call in enumerate(calls):
            if call.tool is None:
                outcomes[index] = _failed(f"Tool {call.name} not found.")
            elif call.tool.is_async:
                awaited[index] = call
            else:
                outcomes[index] = self._run(call.tool.function, call.arguments)
        together = start([self._await(call) for call in awaited.values()]).result()
        outcomes |= zip(awaited, together, strict=True)
        return [outcomes[index] for index in range(len(calls))]

    def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
        if self._timeout is None:
            return _answer(function, arguments, self._media)
        self._worker = self._worker or _Worker()
        answer = self._worker.submit(function, arguments, self._media)
        if wait([answer], self._timeout).done:
            return answer.result()
        self._worker.leave()
        self._worker = None
        return self._too_late()

    async def _await(self, call: Call) -> Outcome:
        assert call.tool is not None
        task = asyncio.ensure_future(_answer_async(call.tool.function, call.arguments, self._media))
        done, _ = await asyncio.wait([task], timeout=self._timeout)
        if done:
            return task.result()
        task.cancel()
        return self._too_late()

    def _too_late(self) -> Outcome:
        return _failed(f"No answer within {self._timeout:g} seconds.")._replace(timed_out=True)


class _Worker:
    """A thread that runs one function after the other. It does not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._work, name="tools", daemon=True).start()

    def submit(
        self, function: Callable[..., Any], arguments: dict[str, Any], media: Media
    ) -> Future[Outcome]:
        answer: Future[Outcome] = Future()
        self._jobs.put((function, arguments, media, answer))
        return answer

    def leave(self) -> None:
        """End the thread when its function returns, if ever."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, arguments, media, answer = job
            try:
                answer.set_result(_answer(function, arguments, media))
            except KeyboardInterrupt as error:  # the tool's own: Ctrl-C is the main thread's
                answer.set_result(_failed(error))


def _answer(function: Callable[..., Any], arguments: dict[str, Any], media: Media) -> Outcome:
    try:
        return Outcome(_parts(function(**arguments), media))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a tool may run code that the model wrote
        return _failed(error)


async def _answer_async(
    function: Callable[..., Any], arguments: dict[str, Any], media: Media
) -> Outcome:
    try:
        return Outcome(_parts(await function(**arguments), media))
    except BaseException as error:  # what leaves a task would end the loop of all of them
        return _failed(error)


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
