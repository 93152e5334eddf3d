"""Tool calls as families of models write them are read, by what their chat templates show."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
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
from tests.support.tools import TEMPLATE

CHATML, LLAMA = "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"
XML = (
    "<tool_call>\n<function={}>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n{}\n"
    "</parameter>\n<parameter=where>\n{}\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>{}\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>{}</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
)
GEMMA = "<|tool_call>call:{}{{city:{},days:{},where:{}}}<tool_call|>"
LFM = "<|tool_call_start|>[{}(city={}, days={}, where={})]<|tool_call_end|>"
OSS = (
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    '{{"city": {}, "days": {}, "where": {}}}<|call|>'
)
LLAMA_CALL = '{{"name": "{}", "parameters": {{"city": {}, "days": {}, "where": {}}}}}<|eot_id|>'
THOUGHT = "<think>\nhm\n</think>\n\n"
# family -> marks of its chat template, how its turns begin and end, a call, a thought, an answer
FAMILIES: dict[str, tuple[str, str, str, str, str, str]] = {
    "Qwen 3.5": ("<function= <parameter= <|im_start|>", CHATML, "<|im_end|>", XML, THOUGHT, "{}"),
    "Nemotron 3": (
        "<function= <parameter= <|im_start|>", CHATML + "<think>\n", "<|im_end|>", XML,
        "hm\n</think>\n", "{}",
    ),
    "GLM 4 MoE": ("<arg_key> <|assistant|>", "<|assistant|>", "<|user|>", GLM, THOUGHT, "{}"),
    "Gemma 4": (
        "<|tool_call>call: <|turn>", "<|turn>model\n", "<turn|>", GEMMA,
        "<|channel>thought\nhm<channel|>", "{}",
    ),
    "LFM2.5": ("<|tool_call_start|> <|im_start|>", CHATML, "<|im_end|>", LFM, THOUGHT, "{}"),
    "gpt-oss": (
        "<|channel|> functions.", "<|start|>assistant", "<|return|>", OSS,
        "<|channel|>analysis<|message|>hm<|end|>", "<|channel|>final<|message|>{}",
    ),
    "Llama 3.1": (
        '{"name": "parameters":  <|start_header_id|>', LLAMA, "<|eot_id|>", LLAMA_CALL, "", "{}",
    ),
}  # fmt: skip


def as_gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(as_gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


# how families write values, where it is not as JSON, and texts, where it is not as other values
WRITES = {GEMMA: as_gemma, LFM: repr}
PLAIN_TEXTS = (XML, GLM)


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


def read(family: str, text: str) -> Any:
    marks, start, end, *_ = FAMILIES[family]
    tokenizer = make_tokenizer(marks, [end])
    parser = TurnParser(tokenizer, {tokenizer.eos_token_id}, families=True)
    assert getattr(tokenizer, "response_template", None) is None  # the user's own is as it was
    return parser.read(text + ("" if text.endswith(end) else end), end, start, SCHEMAS)


def call(family: str, city: str = "12", days: int = 3, where: Any = ARGUMENTS["where"]) -> str:
    """Write a call; text in place of ``where`` stands as it is."""
    form = FAMILIES[family][3]
    write = WRITES.get(form, json.dumps)
    place = where if isinstance(where, str) else write(where)
    return form.format("look", city if form in PLAIN_TEXTS else write(city), days, place)


def both_calls(family: str, one: str, other: str) -> str:
    if family == "LFM2.5":  # in one pair of brackets
        return one.replace("]<|tool_call_end|>", ", ") + other.removeprefix("<|tool_call_start|>[")
    return one + "\n" * (family != "gpt-oss") + other


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


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@example(first=ARGUMENTS | {"city": "    return 1\n"}, second=ARGUMENTS)
@given(first=CALLS, second=CALLS)
def test_calls(family: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """What is written can be read, behind a thought and beside another call."""
    thought = FAMILIES[family][4]
    message = read(family, thought + call(family, **first))
    assert message["tool_calls"] == [tool_call("look", first)]
    assert message["content"] == "" and message.get("reasoning_content", "hm") == "hm"
    assert ("reasoning_content" in message) == bool(thought)
    if family != "Llama 3.1":  # whose template writes one call a turn
        both = both_calls(family, call(family, **first), call(family, **second))
        wanted = [tool_call("look", first), tool_call("look", second)]
        assert read(family, thought + both)["tool_calls"] == wanted


# family -> what is left out of a call, or stands in place of an argument, so that it is none
CUT = {
    **dict.fromkeys(("Qwen 3.5", "Nemotron 3"), ("</parameter>", "</function>", "</tool_call>")),
    "GLM 4 MoE": ("</arg_key>", "</arg_value>", "<arg_value>", "</tool_call>"),
}
BROKEN = {"Gemma 4": '{a:[1,<|"|>'}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_cannot_be_read_is_text(family: str) -> None:
    whole = FAMILIES[family][4] + call(family)
    assert read(family, whole)["tool_calls"]
    texts = [call(family, where=BROKEN.get(family, '{"a": [1'))] if family not in CUT else []
    for gone in CUT.get(family, ()):
        texts += [whole.replace(gone, "", 1), "".join(whole.rsplit(gone, 1))]
    for text in texts:
        message = read(family, text)
        assert message is None or not message.get("tool_calls"), text


# family -> what a mark that is never closed, or never opened, can be made of
PARTS = {
    "gpt-oss": (
        "<|channel|>commentary", " to=functions.look", "<|message|>", "<|call|>", "<|end|>",
    ),
    "Gemma 4": (
        "<|tool_call>call:", "look{city:", '<|"|>', "<tool_call|>", "<eos>", "<channel|>",
        '<|tool_call>call:look{city:"', '\\"', '\\"\\",',
    ),
    "Qwen 3.5": ("<tool_call>\n", "<function=look>", "<parameter=city>", "</parameter>", "<think>"),
    "GLM 4 MoE": ("<tool_call>look", "<arg_key>city", "</arg_key>", "<arg_value>", "</think>"),
    "LFM2.5": ("<|tool_call_start|>[", "look(city=", "]<|tool_call_end|>", "<think>"),
    "Llama 3.1": ('{"name": "look", "parameters": ', '{"name": "', "<|eot_id|>", "}"),
    "plain": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
}  # fmt: skip
LONG = 40_000


@pytest.mark.parametrize("family", PARTS)
def test_long_texts_are_read_in_their_length(family: str) -> None:
    """A search that begins anew behind each mark takes up to minutes for some of these."""
    if family == "plain":
        parser, start, end = TurnParser(make_tokenizer("", ["<|im_end|>"]), {0}), "", "<|im_end|>"
    else:
        marks, start, end, *_ = FAMILIES[family]
        parser = TurnParser(make_tokenizer(marks, [end]), {0}, families=True)
    texts = [fill * (LONG // len(fill)) for fill in (*PARTS[family], *' \n{["\\,')]
    for one, other in itertools.permutations(PARTS[family], 2):
        texts.append(one * (LONG // len(one) // 2) + other * (LONG // len(other) // 2))
        texts.append((one + other) * (LONG // len(one + other)))
    for text in texts:
        began = time.process_time()
        parser.read(text + end, end, start, SCHEMAS)
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


@pytest.mark.parametrize("family", [*PARTS, "own"])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_text_is_read(family: str, data: st.DataObject) -> None:
    """Errors that a text can cause are known; others leave the reader."""
    marks, _, end, *_ = FAMILIES.get(family, ("", "", "<|im_end|>"))
    tokenizer = make_tokenizer(marks, [end])
    if family == "own":
        tokenizer.response_template = LISTED
    parts = [*PARTS.get(family, PARTS["plain"]), *PIECES]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=6)))
    message = TurnParser(tokenizer, {0}, families=True).read(text, end, "", SCHEMAS)
    assert message is None or message["role"] == "assistant"


def fails(error: Exception) -> Callable[..., Any]:
    def parse(*_: Any, **__: Any) -> Any:
        raise error

    return parse


# a template for tools, with the marks of a family
SHOWS_TOOLS = f"{{# {FAMILIES['Qwen 3.5'][0]} #}}{TEMPLATE}"


@pytest.mark.parametrize("error", [AttributeError("no match"), TypeError("one too many")])
def test_an_error_of_a_parser_is_not_taken_for_text(error: Exception, monkeypatch) -> None:
    _, start, end, *_ = FAMILIES["Qwen 3.5"]
    tokenizer = make_tokenizer(SHOWS_TOOLS, [end])
    parser = TurnParser(tokenizer, {0}, families=True)
    monkeypatch.setattr(
        "transformers.tokenization_utils_base._template_parse_response", fails(error)
    )
    with pytest.raises(type(error), match=str(error)) as raised:
        parser.read(call("Qwen 3.5"), end, start, SCHEMAS)
    assert f"transformers {transformers.__version__}: '<tool_call>" in raised.value.__notes__[0]
    with pytest.raises(type(error), match=str(error)):  # before a turn is sampled
        ToolTemplate(tokenizer, {0}, {}).check(SCHEMAS, parser)
    parser = TurnParser(make_tokenizer("", [end]), {0})
    monkeypatch.setattr("grpo_trainer.agents.parse._tagged", fails(error))
    with pytest.raises(type(error), match=str(error)):
        parser.read("text", end, start, SCHEMAS)


def test_a_parser_that_reads_otherwise_is_an_error(monkeypatch) -> None:
    tokenizer = make_tokenizer(SHOWS_TOOLS, ["<|im_end|>"])
    monkeypatch.setattr(tokenizer, "parse_response", lambda text, *_, **__: {"content": text})
    parser = TurnParser(tokenizer, {0}, families=True)
    with pytest.raises(ValueError, match=f"read with transformers {transformers.__version__}"):
        ToolTemplate(tokenizer, {0}, {}).check(SCHEMAS, parser)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("deep", [2, 101, 1_000, 100_000])
def test_calls_that_are_nested_deep_are_text(family: str, deep: int) -> None:
    name = "a" if family == "Gemma 4" else '"a"'
    where = f"{{{name}: {'[' * deep}1{']' * deep}}}"
    message = read(family, FAMILIES[family][4] + call(family, where=where))
    called = message is not None and bool(message.get("tool_calls"))
    assert called == (deep == 2)


# what else a turn may look like: family, text -> content, calls
WRITTEN = [
    *((name, row[4] + row[5].format("Hello, 3 < 4."), "Hello, 3 < 4.", [])
      for name, row in FAMILIES.items()),
    (
        "LFM2.5",
        "Wait, look(city=1). <|tool_call_start|>"
        "[look(city='a), b(c=1)]', where={'t': True, 'n': null}), ping()]<|tool_call_end|>",
        "Wait, look(city=1).",
        [("look", {"city": "a), b(c=1)]", "where": {"t": True, "n": None}}), ("ping", {})],
    ),
    ("LFM2.5", 'Say, look(city=1)" or look(it)', 'Say, look(city=1)" or look(it)', []),
    ("gpt-oss", "just text", "just text", []),
    (
        "gpt-oss", "<|channel|>commentary<|message|>I look.<|end|>" + call("gpt-oss"), "I look.",
        [("look", ARGUMENTS)],
    ),
    (
        "Llama 3.1", "<|python_tag|>" + call("Llama 3.1").replace("eot_id", "eom_id"), "",
        [("look", ARGUMENTS)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), WRITTEN)
def test_turns(family: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    message = read(family, text)
    assert message["content"] == content
    assert (message.get("tool_calls") or []) == [tool_call(*each) for each in calls]


@pytest.mark.parametrize(
    "written",
    ["look(1)", "look(**{'a': 1})", "a.look(b=1)", "look(a=b)", "look(a={1})", "look(a='it's')",
     "look", "", "look(a=1), 3", "look(a=" + "(" * 300 + ")", "look(a=" + "-" * 9000 + "1)"],
)  # fmt: skip
def test_python_that_is_no_call_is_text(written: str) -> None:
    message = read("LFM2.5", f"<|tool_call_start|>[{written}]<|tool_call_end|>")
    assert message is None or not message.get("tool_calls")


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_chat_templates_as_they_are_published(name: str) -> None:
    trl = pytest.importorskip("trl")
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    ends = PUBLISHED[name]
    tokenizer = make_tokenizer(file.read_text(), ends)
    ids = {tokenizer.convert_tokens_to_ids(end) for end in ends}
    parser = TurnParser(tokenizer, ids, families=True)
    ToolTemplate(tokenizer, ids, {}).check(SCHEMAS, parser)
    called = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("look", ARGUMENTS)]},
    ]
    asked, whole = (
        tokenizer.apply_chat_template(
            messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=len(messages) == 1
        )
        for messages in (called[:1], called)
    )
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
    prefix = "".join(pair[0] for pair in pairs)
    message = parser.read(whole.removeprefix(prefix), "", prefix, SCHEMAS)
    assert message is not None and message["tool_calls"] == [tool_call("look", ARGUMENTS)]
