"""Tool calls are read as families of models write them: published chat templates write them."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from grpo_trainer.agents.parse import TurnParser, tool_call
from grpo_trainer.agents.template import ToolTemplate

trl = pytest.importorskip("trl")

# files of TRL's package -> what their turns end with
PUBLISHED = {
    "gptoss": ("<|call|>", "<|return|>", "<|end|>"),
    "glm4moe": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    **dict.fromkeys(("llama3_1", "llama3_2"), ("<|eot_id|>", "<|eom_id|>")),
    **dict.fromkeys(("gemma4", "gemma4_v5"), ("<turn|>", "<tool_call|>", "<|tool_response>")),
    **dict.fromkeys(
        (
            "lfm2_2_5", "lfm2_v2", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6",
            "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
        ),
        ("<|im_end|>",),
    ),
}  # fmt: skip
ONE_CALL = ("gptoss", "llama3_1", "llama3_2")  # in a turn
ONLY_SIMPLE = ("gemma4", "lfm2_2_5")  # their later versions write null, lines and quotes right
THOUGHT, ANSWER = "Let me look it up.", "Hello, 3 < 4."


def look(city: str, days: int, where: dict) -> str:
    """Look.

    Args:
        city: the city.
        days: how many.
        where: a place.
    """
    return ""


SCHEMAS = [get_json_schema(look)]
ARGUMENTS = {"city": "12", "days": 3, "where": {"a": [1, "x, y"]}}


def make_tokenizer(template: str, ends: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, and of the marks in ``template``."""
    found = set(re.findall(r"<\|[a-z_]+\|?>|<[a-z_]+\|>|<eos>", template)) | set(ends)
    characters = [chr(code) for code in range(32, 127)]
    words = {word: i for i, word in enumerate(["<pad>", "\n", *characters, *sorted(found)])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=ends[0],
        additional_special_tokens=sorted(found - {ends[0]}), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = template
    return fast


@cache
def published(name: str) -> PreTrainedTokenizerFast:
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    return make_tokenizer(file.read_text(), PUBLISHED[name])


@cache
def parser_of(name: str) -> TurnParser:
    tokenizer = published(name)
    parser = TurnParser(tokenizer, {tokenizer.eos_token_id}, families=True)
    assert getattr(tokenizer, "response_template", None) is None  # the user's own is as it was
    return parser


def written(name: str, *calls: dict[str, Any], content: str = "") -> tuple[str, str]:
    """Return what comes before a turn, and the turn, as the template writes a thought and calls."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    turn |= dict.fromkeys(("reasoning_content", "thinking"), THOUGHT)
    turn |= {"tool_calls": [tool_call("look", one) for one in calls]} if calls else {}
    question = {"role": "user", "content": "q"}
    asked, whole = (
        published(name).apply_chat_template(
            messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=len(messages) == 1
        )
        for messages in ([question], [question, turn])
    )
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
    prefix = "".join(pair[0] for pair in pairs)
    text, ends = whole.removeprefix(prefix).removesuffix("\n"), PUBLISHED[name]
    return prefix, text if text.endswith(ends) else text + ends[0]


@cache
def before_a_call(name: str) -> str:
    return written(name, ARGUMENTS)[0]


def read(name: str, text: str, prefix: str | None = None) -> Any:
    """Read a turn; ``prefix`` is what comes before it, else what comes before a call."""
    prefix = before_a_call(name) if prefix is None else prefix
    ends = [end for end in PUBLISHED[name] if text.endswith(end)]
    return parser_of(name).read(text, ends[0] if ends else "", prefix, SCHEMAS)


def is_text(message: Any) -> bool:
    return message is None or not message.get("tool_calls")


# texts have no marks, for which a family has special tokens
TEXTS = st.text(st.characters(exclude_characters="<|", exclude_categories=("Cs",)), max_size=12)
KEYS = st.text("abc_", min_size=1, max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(KEYS, each, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    dict, city=TEXTS, days=st.integers(-99, 99), where=st.dictionaries(KEYS, VALUES, max_size=2)
)


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@example(first=ARGUMENTS | {"city": "    return 1\n"}, second=ARGUMENTS)
@given(first=CALLS, second=CALLS)
def test_what_is_written_can_be_read(name: str, first: Any, second: Any) -> None:
    """An answer, a call and two of them, behind a thought."""
    first = ARGUMENTS if name in ONLY_SIMPLE else first
    second = ARGUMENTS if name in ONLY_SIMPLE else second
    for calls in [(), (first,), (first, second)][: 2 if name in ONE_CALL else 3]:
        content = "" if calls else ANSWER
        prefix, turn = written(name, *calls, content=content)
        message = read(name, turn, prefix)
        expected = {"role": "assistant", "content": content}
        if calls:
            expected["tool_calls"] = [tool_call("look", arguments) for arguments in calls]
        if THOUGHT in turn:
            expected["reasoning_content"] = THOUGHT
        assert {key: value for key, value in message.items() if value != []} == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_take_tools(name: str) -> None:
    tokenizer = published(name)
    ids = {tokenizer.convert_tokens_to_ids(end) for end in PUBLISHED[name]}
    ToolTemplate(tokenizer, ids, {}).check(SCHEMAS, parser_of(name))


# what is left out of a call, so that it is none
CUT = {
    "qwen3_5_think": ("</parameter>", "</function>", "</tool_call>"),
    "glm4moe": ("</arg_key>", "</arg_value>", "<arg_value>", "</tool_call>"),
    "gemma4": ('x, y<|"|>]}',),
    **dict.fromkeys(("gptoss", "lfm2_2_5", "llama3_1"), (', "x, y"]}',)),
}


@pytest.mark.parametrize(("name", "parts"), CUT.items(), ids=CUT)
def test_a_call_that_cannot_be_read_is_text(name: str, parts: tuple[str, ...]) -> None:
    _, turn = written(name, ARGUMENTS)
    assert not is_text(read(name, turn))
    for part in parts:
        for text in (turn.replace(part, "", 1), "".join(turn.rsplit(part, 1))):
            assert text != turn and is_text(read(name, text)), text


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("deep", [2, 101, 1_000, 100_000])
def test_calls_that_are_nested_deep_are_text(name: str, deep: int) -> None:
    _, turn = written(name, ARGUMENTS | {"where": {"a": 0}})
    nested = turn.replace("0}", f"{'[' * deep}1{']' * deep}}}")
    assert nested != turn and is_text(read(name, nested)) == (deep > 2)


# what a mark that is never closed, or never opened, can be made of
PARTS = {
    "gptoss": (
        "<|channel|>commentary", " to=functions.look", "<|message|>", "<|call|>", "<|end|>",
    ),
    "gemma4": (
        "<|tool_call>call:", "look{city:", '<|"|>', "<tool_call|>", "<eos>", "<channel|>",
        '<|tool_call>call:look{city:"', '\\"', '\\"\\",',
    ),
    "qwen3_5_think": (
        "<tool_call>\n", "<function=look>", "<parameter=city>", "</parameter>", "<think>",
    ),
    "glm4moe": ("<tool_call>look", "<arg_key>city", "</arg_key>", "<arg_value>", "</think>"),
    "lfm2_2_5": ("<|tool_call_start|>[", "look(city=", "]<|tool_call_end|>", "<think>"),
    "llama3_1": ('{"name": "look", "parameters": ', '{"name": "', "<|eot_id|>", "}"),
    "plain": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
}  # fmt: skip
LONG = 40_000


@cache
def reader(name: str) -> Callable[[str], Any]:
    """Return what reads a turn of a family, of none or by a tokenizer's own template, with an end
    that it adds."""
    if name in PUBLISHED:
        return lambda text: read(name, text + PUBLISHED[name][0])
    tokenizer = make_tokenizer("", ["<|im_end|>"])
    tokenizer.response_template = LISTED if name == "own" else None
    parser = TurnParser(tokenizer, {tokenizer.eos_token_id})
    return lambda text: parser.read(f"{text}<|im_end|>", "<|im_end|>", "", SCHEMAS)


@pytest.mark.parametrize("name", PARTS)
def test_long_texts_are_read_in_their_length(name: str) -> None:
    """A search that begins anew behind each mark takes up to minutes for some of these."""
    parse = reader(name)
    texts = [fill * (LONG // len(fill)) for fill in (*PARTS[name], *' \n{["\\,')]
    for one, other in itertools.permutations(PARTS[name], 2):
        texts.append(one * (LONG // len(one) // 2) + other * (LONG // len(other) // 2))
        texts.append((one + other) * (LONG // len(one + other)))
    for text in texts:
        began = time.process_time()
        parse(text)
        assert time.process_time() - began < 4, text[:60]


# what can go wrong behind a mark: JSON, Python, numbers, depth
PIECES = (
    *'{}[]()"=,:\\', "\x00", "\x01", "\ud800", "1e999", "9" * 5000, "null", "look(a=", "{[1]:2}",
    "1j", "(" * 300, "-" * 3000, "[" * 3000, '{"a":' * 3000, ']<|tool_call_end|>', "] + [",
    '{"name": "look", "arguments": {}}', '{"name": 1}', '{"function": 1}',
    '<tool_call>[{"name": "look"}]</tool_call>', '<tool_call>1</tool_call>',
)  # fmt: skip
LISTED = {  # a tokenizer's own: calls are items of a list
    "start_anchor": "<s>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*PARTS, "own"])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_text_is_read(name: str, data: st.DataObject) -> None:
    """Errors that a text can cause are known; others leave the reader."""
    parts = [*PARTS.get(name, PARTS["plain"]), *PIECES]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=6)))
    message = reader(name)(text)
    assert message is None or message["role"] == "assistant"


def fails(error: Exception) -> Callable[..., Any]:
    def parse(*_: Any, **__: Any) -> Any:
        raise error

    return parse


@pytest.mark.parametrize("error", [AttributeError("no match"), TypeError("one too many")])
def test_an_error_of_a_parser_is_not_taken_for_text(error: Exception, monkeypatch) -> None:
    name = "qwen3_5_think"
    prefix, turn = written(name, ARGUMENTS)
    monkeypatch.setattr(
        "transformers.tokenization_utils_base._template_parse_response", fails(error)
    )
    with pytest.raises(type(error), match=str(error)) as raised:
        read(name, turn, prefix)
    assert f"transformers {transformers.__version__}: '{THOUGHT}" in raised.value.__notes__[0]
    with pytest.raises(type(error), match=str(error)):  # before a turn is sampled
        ToolTemplate(published(name), {0}, {}).check(SCHEMAS, parser_of(name))
    monkeypatch.setattr("grpo_trainer.agents.parse._tagged", fails(error))
    with pytest.raises(type(error), match=str(error)):
        reader("plain")("text")


def test_a_parser_that_reads_otherwise_is_an_error(monkeypatch) -> None:
    tokenizer = published("qwen3_5_think")
    monkeypatch.setattr(tokenizer, "parse_response", lambda text, *_, **__: {"content": text})
    with pytest.raises(ValueError, match=f"parsed with transformers {transformers.__version__}"):
        ToolTemplate(tokenizer, {0}, {}).check(SCHEMAS, parser_of("qwen3_5_think"))


LLAMA_CALL, OSS_CALL = (written(name, ARGUMENTS)[1] for name in ("llama3_1", "gptoss"))
# what else a turn may look like: family, text -> content, calls
TURNS = [
    (
        "lfm2_2_5",
        "Wait, look(city=1). <|tool_call_start|>"
        "[look(city='a), b(c=1)]', where={'t': True, 'n': null}), ping()]<|tool_call_end|>",
        "Wait, look(city=1).",
        [("look", {"city": "a), b(c=1)]", "where": {"t": True, "n": None}}), ("ping", {})],
    ),
    ("lfm2_2_5", 'Say, look(city=1)" or look(it)', 'Say, look(city=1)" or look(it)', []),
    ("gptoss", "just text", "just text", []),
    (
        "gptoss", "<|channel|>commentary<|message|>I look.<|end|>" + OSS_CALL, "I look.",
        [("look", ARGUMENTS)],
    ),
    (
        "llama3_1", "<|python_tag|>" + LLAMA_CALL.replace("eot_id", "eom_id"), "",
        [("look", ARGUMENTS)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), TURNS)
def test_turns(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    text = text if text.endswith(PUBLISHED[name]) else text + PUBLISHED[name][-1]
    message = read(name, text)
    assert message["content"] == content
    assert (message.get("tool_calls") or []) == [tool_call(*each) for each in calls]


@pytest.mark.parametrize(
    "code",
    ["look(1)", "look(**{'a': 1})", "a.look(b=1)", "look(a=b)", "look(a={1})", "look(a='it's')",
     "look", "", "look(a=1), 3", "look(a=" + "(" * 300 + ")", "look(a=" + "-" * 9000 + "1)"],
)  # fmt: skip
def test_python_that_is_no_call_is_text(code: str) -> None:
    assert is_text(read("lfm2_2_5", f"<|tool_call_start|>[{code}]<|tool_call_end|><|im_end|>"))
