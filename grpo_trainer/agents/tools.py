"""Tools that a model may call: functions, and methods of the environments of completions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from datasets import Dataset, IterableDataset
from PIL import Image
from transformers.utils import get_json_schema

from grpo_trainer.common import encodable, in_thread, message_of, shortened, start
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Media, Prompt, Row, Sample, content_blocks, open_images
from grpo_trainer.rewards import RewardFunction

T = TypeVar("T")
EnvironmentFactory: TypeAlias = Callable[[], Any] | Mapping[str, Callable[[], Any]]

_EMPTY = [{"role": "user", "content": ""}]  # an empty prompt, for `reset` to fill
_NO_TOOLS = ("reset", "get_reward")  # public methods that the model cannot call
_BLOCK_TYPES = ("text", "image")  # types that a tool may return


class Tool(NamedTuple):
    """A function that the model can call."""

    function: Callable[..., Any]
    schema: dict[str, Any]  # JSON schema for chat templates


Toolbox = dict[str, Tool]  # by name


def make_toolbox(functions: Iterable[Callable[..., Any]], argument: str = "tools") -> Toolbox:
    """Return the functions as tools.

    Args:
        functions: plain or ``async`` functions or methods with type hints and a docstring that
            describes each argument in Google style.
        argument: error messages begin with its name.

    Raises:
        ValueError: one is not a function, lacks a hint or a description, or repeats a name.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise ValueError(f"{argument}: expected a list of functions, got {functions!r}")
    toolbox: Toolbox = {}
    for function in functions:
        if not inspect.isfunction(function) and not inspect.ismethod(function):
            raise ValueError(f"{argument}: expected functions or methods, got {function!r}")
        name = function.__name__
        if name in toolbox:
            raise ValueError(f"{argument}: expected distinct names, got {name!r} twice")
        try:
            toolbox[name] = Tool(function, get_json_schema(function))
        except Exception as error:  # transformers raises three kinds, and typing a NameError
            raise ValueError(
                f"{argument}: expected type hints for all arguments of {name!r} and a docstring "
                f"with an `Args:` section that describes them: {error}"
            ) from error
    return toolbox


def schemas(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return the tools' schemas for a chat template."""
    return [tool.schema for tool in toolbox.values()]


def bind(toolbox: Toolbox, name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return a tool bound to its arguments; for an unknown tool, a function that raises
    LookupError."""

    def missing() -> None:
        raise LookupError(f"Tool {name} not found.")

    return partial(toolbox[name].function, **arguments) if name in toolbox else missing


class Outcome(NamedTuple):
    """The result of a call, for the model."""

    blocks: list[dict[str, Any]]  # text, and open images
    failed: bool = False
    timed_out: bool = False


def run_tools(
    functions: list[Callable[[], Any]],
    image_tokens: Collection[str] = (),
    timeout: float | None = None,
) -> list[Outcome]:
    """Return the result of each function, or its error if it raises or exceeds the time limit.

    First the plain functions run, in order, then all ``async`` functions together. With a time
    limit, each plain function runs on its own thread; after the limit it cannot be stopped, so its
    thread is abandoned. Without a limit, they run on the caller's thread.

    Args:
        functions: plain or ``async``, without arguments.
        image_tokens: tokens of images, which no text may contain.
        timeout: seconds for each function; None: no limit.
    """
    outcomes: dict[int, Outcome | None] = {}
    pending: dict[int, Future[list[Outcome]]] = {}
    is_async = [inspect.iscoroutinefunction(function) for function in functions]
    for index in sorted(range(len(functions)), key=is_async.__getitem__):
        function = functions[index]
        if is_async[index]:
            pending[index] = start([_run_async(function)])
        elif timeout is None:
            outcomes[index] = _run(function)
        else:
            outcomes[index] = _within(in_thread(partial(_run, function), "tool"), timeout)
    wait(pending.values(), timeout)
    for index, future in pending.items():
        finished = _within(future, 0)
        outcomes[index] = finished[0] if finished else None
    late = _failed(f"No answer within {timeout or 0:g} seconds.")._replace(timed_out=True)
    results = [outcomes[index] or late for index in range(len(functions))]
    for index, outcome in enumerate(results):
        texts = [block.get("text", "") for block in outcome.blocks]
        if any(token in text for token in image_tokens for text in texts):
            results[index] = _failed("The answer contains a token that represents an image.")
    return results


def _run(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(_blocks(function()))
    except BaseException as error:  # a tool may run code that the model wrote
        in_main_thread = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and in_main_thread:  # Ctrl-C
            raise
        return _failed(error)


async def _run_async(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(_blocks(await function()))
    except BaseException as error:  # an error that left the task would end the event loop
        return _failed(error)


def _within(future: Future[T], seconds: float) -> T | None:
    """Return the result of ``future``; None if it exceeds the time limit."""
    try:
        return future.result(seconds)
    except TimeoutError:
        future.cancel()
        return None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": encodable(text)}


def _blocks(value: Any) -> list[dict[str, Any]]:
    """Return a tool's value as blocks: an image, a message's content, or else text."""
    blocks = [{"type": "image", "image": value}] if isinstance(value, Image.Image) else value
    blocks = blocks if isinstance(blocks, list) else []
    types = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    if not types or any(block_type not in _BLOCK_TYPES for block_type in types):
        return [_text(str(value))]
    for image in [block.get("image") for block in blocks if block["type"] == "image"]:
        if not isinstance(image, Image.Image):  # the policy may have written a file name
            raise ValueError(f"image: expected an open PIL image, got {shortened(image)}")
    return [
        {"type": "image", "image": Media().open(block["image"])}
        if block["type"] == "image"
        else _text(str(block.get("text") or ""))
        for block in blocks
    ]


def _failed(error: BaseException | str) -> Outcome:
    text = message_of(error) if isinstance(error, BaseException) else error
    return Outcome([_text(str({"error": text}))], failed=True)


def prompts_by_reset(factory: EnvironmentFactory, args: GRPOConfig) -> IterableDataset | None:
    """Return a stream of empty prompts for environments that provide their own.

    None without ``max_steps``, since a stream has no end, and for several kinds of environments,
    since a column must choose between them.
    """
    if isinstance(factory, Mapping) or args.max_steps < 1:
        return None
    rows = Dataset.from_list([{"prompt": _EMPTY}] * args.prompts_per_generation)
    return rows.to_iterable_dataset()


class Environments:
    """Gives each completion its own environment, and reuses released ones.

    ``toolboxes`` has the tools of each kind; ``rewards`` has a reward for each class with
    ``get_reward``, under the name of the class.

    Args:
        factory: creates an environment, or a dictionary of such functions; a row names one in its
            column ``environment``.
        tools: tools of all completions, in addition to their environment's methods.

    Raises:
        ValueError: an environment has no ``reset``, or has a method that cannot be a tool.
    """

    def __init__(self, factory: EnvironmentFactory, tools: Toolbox) -> None:
        self._by_column = isinstance(factory, Mapping)
        self._factories: dict[Any, Any] = {None: factory}
        if isinstance(factory, Mapping):
            self._factories = dict(factory)
        self._tools = tools
        # unused environments; completions take them on several threads
        self._free = {name: [self._make(name)] for name in self._factories}
        self._taken: dict[int, tuple[str | None, Toolbox]] = {}  # by the environment's id
        self.scored: list[Any] = []  # environments of the completions that were scored last
        self._lock = threading.Lock()
        firsts = [pool[0] for pool in self._free.values()]
        self.toolboxes = [toolbox for _, toolbox in firsts]
        classes = dict.fromkeys(type(environment) for environment, _ in firsts)
        self.rewards = [_reward(kind) for kind in classes if hasattr(kind, "get_reward")]

    def take(self, sample: Sample) -> tuple[Any, Toolbox]:
        """Return an environment for ``sample``, until it is released, and the sample's tools."""
        name = sample.inputs.get("environment") if self._by_column else None
        if name not in self._factories:
            expected = ", ".join(map(str, self._factories))
            raise ValueError(
                f"environment: expected one of {expected} in that column, got {name!r}"
            )
        with self._lock:
            pool = self._free[name]
            environment, toolbox = pool.pop(0) if pool else self._make(name)
            self._taken[id(environment)] = name, toolbox
        return environment, toolbox

    @contextmanager
    def scoring(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Set ``scored`` to the environments of ``samples``; afterward, release them for reuse."""
        self.scored = [sample.inputs["environments"] for sample in samples]
        try:
            yield
        finally:
            with self._lock:
                for environment in self.scored:
                    if (key := id(environment)) in self._taken:
                        name, toolbox = self._taken.pop(key)
                        self._free[name].append((environment, toolbox))

    def drop(self, environment: Any) -> None:
        """Do not reuse it: a call may still be working on it."""
        with self._lock:
            self._taken.pop(id(environment), None)  # several of its tools may time out

    def reset(self, environment: Any, row: Row, media: Media) -> Prompt:
        """Return the prompt of ``row``, with the environment's first observation.

        ``media`` limits where its images may come from.

        Raises:
            ValueError: the observation is not text or blocks, or the prompt has no place for it.
        """
        columns = {k: v for k, v in row.items() if not (self._by_column and k == "environment")}
        observation = environment.reset(**columns)
        # for other rows, images are already in the prompts
        prompt = (row if "prompt" in row else open_images({**row, "prompt": _EMPTY}))["prompt"]
        if observation is None:
            return prompt
        kind = type(environment).__name__
        if not _is_content(observation):
            raise ValueError(
                f"{kind}.reset: expected text, a list of blocks {{'type': ...}} or None, got "
                f"{shortened(observation)}"
            )
        if isinstance(prompt, str) or not _is_content(prompt[-1].get("content")):
            raise ValueError(
                f"prompt: expected messages, the last one with a content that {kind}.reset can add "
                f"to, got {shortened(prompt)}"
            )
        content = prompt[-1]["content"]
        if isinstance(content, str) and isinstance(observation, str):
            content += observation
        else:
            content = [*content_blocks(content), *content_blocks(observation)]
        messages = [*prompt[:-1], prompt[-1] | {"content": content}]
        return open_images({"prompt": messages}, media)["prompt"]

    def _make(self, name: str | None) -> tuple[Any, Toolbox]:
        """Return an environment and its tools."""
        make = self._factories[name]
        if not callable(make):
            raise ValueError(f"environment_factory: expected a function or a class, got {make!r}")
        environment = make()
        kind = type(environment)
        reset = getattr(kind, "reset", None)
        if not inspect.isfunction(reset) or inspect.iscoroutinefunction(reset):
            raise ValueError(
                "environment_factory: expected environments with a plain method reset(**row), got "
                f"{kind.__name__} without"
            )
        # methods of the class: on the object, properties would be evaluated
        methods = [
            getattr(environment, name)
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in _NO_TOOLS
        ]
        toolbox = make_toolbox(methods, f"environment_factory: {kind.__name__}")
        duplicates = sorted(toolbox.keys() & self._tools.keys())
        if duplicates:
            raise ValueError(
                "environment_factory: expected method names that differ from tools' names, got "
                f"{duplicates[0]!r} twice"
            )
        return environment, self._tools | toolbox


def _is_content(value: Any) -> bool:
    """Return whether it can be a message's content: text, or a list of blocks."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in value)


def _reward(kind: Any) -> RewardFunction:
    """Return the reward of a class, which is None for completions in other environments."""

    def reward(environments: list[Any], **kwargs: Any) -> list[Any]:
        return [env.get_reward() if type(env) is kind else None for env in environments]

    async def async_reward(environments: list[Any], **kwargs: Any) -> list[Any]:
        return [await env.get_reward() if type(env) is kind else None for env in environments]

    is_async = inspect.iscoroutinefunction(kind.get_reward)
    return RewardFunction(kind.__name__, async_reward if is_async else reward, is_async)
