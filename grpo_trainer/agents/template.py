"""The tokens that a chat template writes between a turn that calls tools and the next turn.

Tokens of earlier turns stay as they were sampled: rendering the whole conversation again could
tokenize them differently, and the loss would then cover tokens that the policy did not sample. So
the results are rendered after a short stand-in for the conversation, and the tokens that the
template adds are appended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import transformers
from jinja2 import TemplateError, TemplateRuntimeError
from transformers import ProcessorMixin

from grpo_trainer.agents.parse import Message, TurnParser, tool_call
from grpo_trainer.common import shortened
from grpo_trainer.data import Encoded, ProcessingClass, encode_text, images_of, tokenizer_of

logger = logging.getLogger(__name__)

Schemas = list[dict[str, Any]]

_USER: Message = {"role": "user", "content": "question"}
# Templates of thinking models write an empty thought into the last turn, but not into earlier
# turns. They write a nonempty thought into both.
_THOUGHTS: tuple[Message, ...] = ({}, {"reasoning_content": "thought"})
_TURN: Message = {"role": "assistant", "content": "answer"}
# arguments and a result that do not occur in any template
_VALUES = {"value_of_argument": "a1b2c3"}
_RESULT = "result_d4e5f6"
_MAX_BEGINNINGS = 256  # a policy can call any number of nonexistent tools


@dataclass(eq=False)
class ToolTemplate:
    """The chat template of a tokenizer or processor, for conversations with tools."""

    processing_class: ProcessingClass
    eos_token_ids: Collection[int]
    options: dict[str, Any]  # more arguments of ``apply_chat_template``
    _thought: Message = field(default_factory=dict, init=False)  # in the stand-in, one of _THOUGHTS
    _arguments: Any = field(default_factory=_VALUES.copy, init=False)  # of the stand-in's calls
    _beginnings: dict[str, list[int]] = field(default_factory=dict, init=False)  # a cache

    def __post_init__(self) -> None:
        self._tokenizer = tokenizer_of(self.processing_class)

    def results(
        self, messages: list[Message], tools: Schemas, end: int | None = None
    ) -> tuple[Encoded, int]:
        """Return a conversation with results, up to the start of the assistant's next turn, and the
        index of the first token after the turn with the calls.

        Args:
            messages: the results, ``{"role": "tool", "name", "content"}``.
            tools: schemas of the conversation's tools.
            end: the token that the turn ended with; None: the template's end token.

        Raises:
            ValueError: the template writes earlier turns differently if results follow them, or
                omits an image, or there is no processor for an image.
        """
        for thought in (self._thought, *_THOUGHTS):
            encoded = self._encode(messages, tools, thought)
            beginning = self._beginning(messages, tools, thought)
            start = len(beginning)
            if encoded.ids[:start] == beginning:
                self._thought = thought
                # GLM ends a turn with the token that begins the next message
                return encoded, start + (encoded.ids[start : start + 1] == [end])
            self._beginnings.clear()  # stale if the template writes the date
        raise ValueError(
            "processing_class: expected a chat template that only appends to a conversation when a "
            "tool answers, so that the next turn continues the sampled tokens, got a template that "
            f"writes earlier turns differently before {shortened(messages)}"
        )

    def check(self, tools: Schemas, parser: TurnParser) -> None:
        """Raise ValueError unless the template can write a conversation with ``tools``, and
        ``parser`` can read its calls."""
        if self._tokenizer.chat_template is None:
            raise _unsupported("none")
        try:
            self._probe(tools, parser)
        except TemplateError as error:
            raise _unsupported(f"a template that fails: {error}") from error

    def _probe(self, tools: Schemas, parser: TurnParser) -> None:
        """Write a call and its result, and parse them."""
        name = tools[0]["function"]["name"]
        prefix = self._text([_USER], tools, add_generation_prompt=True)
        if name not in prefix:
            logger.warning(
                "the chat template does not show the tools: describe them in the prompts"
            )
        try:
            text = self._text(self._conversation([name], self._thought), tools)
        except TemplateError:  # DeepSeek's template expects arguments as JSON text
            self._arguments = json.dumps(_VALUES)
            text = self._text(self._conversation([name], self._thought), tools)
        if not text.startswith(prefix):
            # it opens a thought, which a turn without one does not have; tags may have a common
            # start
            ids = self._ids(text)
            start = _shared(ids, self._ids(prefix))
            prefix, text = self._tokenizer.decode(ids[:start]), self._tokenizer.decode(ids)
        turn = text.removeprefix(prefix)
        if not all(part in turn for part in (name, *_VALUES, *_VALUES.values())):
            raise _unsupported("a template that omits tool calls")
        message = parser.read(turn, "", prefix, tools)
        if message is None or message.get("tool_calls") != [tool_call(name, _VALUES)]:
            raise ValueError(
                "processing_class: expected a chat template with a known format of tool calls, got "
                "another format; describe it in the tokenizer's response_template (without one the "
                f"format is <tool_call>{{JSON}}</tool_call>); parsed with transformers "
                f"{transformers.__version__}"
            )
        result = result_message(name, [{"type": "text", "text": _RESULT}])
        self.results([result], tools)
        conversation = [*self._conversation([name], self._thought), result]
        prefix = self._text(conversation, tools, add_generation_prompt=True)
        if _RESULT not in prefix:
            raise _unsupported("a template that omits the results of tools")
        message = parser.read("text", "", prefix, tools)
        if message is not None and message.get("tool_calls"):
            raise ValueError(
                "processing_class: expected a response_template with a start_anchor after the "
                "results of tools, got one that parses the earlier calls again"
            )

    def _beginning(self, messages: list[Message], tools: Schemas, thought: Message) -> list[int]:
        """Return the tokens that a conversation with these results should begin with."""
        names = [message["name"] for message in messages]
        key = json.dumps([names, tools, thought])
        ids = self._beginnings.get(key)
        if ids is None:
            ids = self._render_beginning(names, tools, thought)
            if len(self._beginnings) >= _MAX_BEGINNINGS:
                self._beginnings.clear()
            self._beginnings[key] = ids
        return ids

    def _render_beginning(self, names: list[str], tools: Schemas, thought: Message) -> list[int]:
        ids = self._ids(self._text(self._conversation(names, thought), tools))
        # The turn was sampled up to its end token; a template may write more after it. Other
        # messages have end tokens, too: some models end a turn with the token that begins others.
        turn = _shared(ids, self._ids(self._text([_USER, _TURN | thought], tools)))
        end = next((i for i in range(turn, len(ids)) if ids[i] in self.eos_token_ids), len(ids))
        return ids[: end + 1]

    def _encode(self, messages: list[Message], tools: Schemas, thought: Message) -> Encoded:
        """Return a conversation with the results."""
        calling = self._conversation([message["name"] for message in messages], thought)
        text = self._text([*calling, *messages], tools, add_generation_prompt=True)
        images = images_of(messages)
        if images and not isinstance(self.processing_class, ProcessorMixin):
            name = next(message["name"] for message in messages if images_of([message]))
            raise ValueError(
                f"tools: expected no image from {name!r}, since the policy accepts none; models "
                "that accept images have a processor as processing_class, not a "
                f"{type(self.processing_class).__name__}"
            )
        encoder = self.processing_class if images else self._tokenizer
        return encode_text(text, images, encoder)

    def _conversation(self, names: list[str], thought: Message) -> list[Message]:
        calls = [tool_call(name, self._arguments) for name in names]
        return [_USER, {"role": "assistant", "content": "", "tool_calls": calls, **thought}]

    def _text(self, messages: list[Message], tools: Schemas, **options: Any) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, **self.options, **options
            )
        except TypeError as error:  # from an expression in the template
            raise TemplateRuntimeError(str(error)) from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def result_message(name: str, blocks: list[dict[str, Any]]) -> Message:
    """Return the result of a tool for chat templates: plain text if there are no images."""
    texts = [block["text"] for block in blocks if "text" in block]
    content = "".join(texts) if len(texts) == len(blocks) else blocks
    return {"role": "tool", "name": name, "content": content}


def _unsupported(got: str) -> ValueError:
    return ValueError(
        f"processing_class: expected a chat template for conversations with tools, got {got}"
    )


def _shared(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
