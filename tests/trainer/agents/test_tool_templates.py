"""Which tools and chat templates can be used, and what becomes of the others."""

from __future__ import annotations

import math

import pytest

from grpo_trainer.agents import make_toolbox
from grpo_trainer.agents.template import ToolTemplate
from grpo_trainer.agents.tools import schemas
from tests.support.tools import TEMPLATE, Play, add, call, make_tool_tokenizer, results, then


def test_a_response_template_reads_calls():
    template = TEMPLATE.replace(
        "<tool_call>{{ call.function | tojson }}</tool_call>",
        "[{{ call.function.name }}:{{ call.function.arguments | tojson }}]",
    )
    tokenizer = make_tool_tokenizer(template)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\[(?P<name>\w+):", "close": "]", "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function", "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"close": "<|end|>", "content": "text"},
        },
    }  # fmt: skip
    play = Play(then('so [add:{"a": 1, "b": 2}]', "three"), tokenizer=tokenizer)
    [rollout] = play().samples
    contents = [message["content"] for message in rollout.completion]
    assert contents == ["so", "3", "three"]
    [rollout] = Play(lambda text: "[add:{]", tokenizer=tokenizer)().samples
    assert rollout.completion == [{"role": "assistant", "content": "[add:{]"}]
    # a turn that goes on right behind an answer begins nowhere, so that its message is the last one
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'tool'"
    )
    with pytest.raises(ValueError, match="one that parses the earlier calls again"):
        Play(then(""), tokenizer=tokenizer)
    anchors = r"<\|start\|>(assistant\n|tool\n[^<]*<\|end\|>\n)"
    del tokenizer.response_template["start_anchor"]
    tokenizer.response_template["start_anchor_pattern"] = anchors
    [rollout] = Play(then('[add:{"a": 1, "b": 2}]', "three"), tokenizer=tokenizer)().samples
    assert [message["content"] for message in rollout.completion] == ["", "3", "three"]


def no_hint(a) -> int:
    """Add.

    Args:
        a: a number.
    """
    return a


def no_docstring(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([no_hint], "tools: expected type hints for all arguments of 'no_hint'"),
        ([no_docstring], "of 'no_docstring' and a docstring .*: .* no docstring"),
        ([add, add], "tools: expected distinct names, got 'add' twice"),
        ([3], "tools: expected functions or methods, got 3"),
        (add, "tools: expected a list of functions"),
    ],
)
def test_wrong_tools(tools, message):
    with pytest.raises(ValueError, match=message):
        make_toolbox(tools)


THINKS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "[{{ m.reasoning_content }}]{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "expected a chat template for conversations with tools, got none"),
        (TEMPLATE.replace("call.function", "''"), "got a template that omits tool calls"),
        (TEMPLATE.replace("m.content", "m.content if m.role == 'user'"), "omits the results"),
        ("{{ raise_exception('no') }}", "tools, got a template that fails: no"),
        ("{{ 'a' + messages }}", "tools, got a template that fails: can only concatenate"),
        (
            "{% if messages[1:] %}{{ raise_exception('no calls') }}{% endif %}",
            "tools, got a template that fails: no calls",
        ),
        (TEMPLATE.replace("m.role", "m.role ~ loop.revindex"), "writes earlier turns differently"),
        (
            TEMPLATE.replace("<tool_call>", "<call>"),
            "got another format; describe it in the tokenizer's resp",
        ),
    ],
)
def test_templates_without_tools(template, message):
    with pytest.raises(ValueError, match=f"processing_class: .*{message}"):
        Play(then(""), tokenizer=make_tool_tokenizer(template))


# a call's arguments are JSON already, and a generation prompt opens a thought
OPENS_A_THOUGHT = TEMPLATE.replace(
    "{{ call.function | tojson }}",
    """{{ '{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ call.function.arguments + '}' }}",
).replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
NO_END = TEMPLATE.replace("<|end|>\n", "")
CALL = call("add", a=1, b=1)
ANSWERED = "\n<|start|>tool\n2<|end|>\n<|start|>assistant\n"
# what a template does -> itself, its tokens, ids that end a turn; a turn that calls, what follows,
# and the next turn
TEMPLATES = {
    "thoughts in the last turn": (THINKS, (), [2], f"[]{CALL}<|end|>", ANSWERED, "2<|end|>"),
    "arguments as text, behind an open thought": (
        OPENS_A_THOUGHT, TAGS, [2], f"hm</think>{CALL}<|end|>", f"{ANSWERED}<think>",
        "so</think>2<|end|>",
    ),
    "a document's end behind a turn": (
        TEMPLATE + "{% if not add_generation_prompt %}<pad>{% endif %}", (), [0, 2],
        f"{CALL}<|end|>", ANSWERED, "2<|end|>",
    ),
    "no end behind a turn": (
        NO_END, (), [1, 2], f"{CALL}{CALL}<|end|>",
        "<|start|>tool\n2<|start|>tool\n2<|start|>assistant\n", "2<|end|>",
    ),
    "turns that end with what a message begins with": (
        NO_END, (), [1, 2], f"{CALL}{CALL}<|start|>",
        "tool\n2<|start|>tool\n2<|start|>assistant\n", "2<|start|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_follows_a_turn_is_the_templates(kind):
    """And the turns' tokens are the policy's, whatever the template would write in their place."""
    template, tags, ends, *parts = TEMPLATES[kind]
    tokenizer = make_tool_tokenizer(template, tags)
    first, middle, last = (tokenizer.encode(part) for part in parts)
    play = Play(
        lambda text: last if results(text) else first,
        tokenizer=tokenizer,
        generation_kwargs={"eos_token_id": ends},
    )
    [rollout] = play().samples
    assert play.text(rollout.completion_ids) == "".join(parts)
    assert rollout.env_mask == [1] * len(first) + [0] * len(middle) + [1] * len(last)
    assert rollout.by_policy == rollout.env_mask and not rollout.truncated
    assert [not math.isnan(value) for value in rollout.logprobs] == rollout.env_mask
    called, answer, *_, end = rollout.completion
    assert called["role"] == end["role"] == "assistant" and end["content"] == "2"
    function = {"name": "add", "arguments": {"a": 1, "b": 1}}
    calls = [{"type": "function", "function": function}] * parts[0].count(CALL)
    assert called["tool_calls"] == calls and len(rollout.completion) == 2 + len(calls)
    assert answer == {"role": "tool", "name": "add", "content": "2"}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("<think>\nhm\n</think>\n\n2", {"content": "2", "reasoning_content": "hm"}),
        ("<think></think>2", {"content": "2"}),
        ("<think>never ended", {"content": "", "reasoning_content": "never ended"}),
        ("2 <think>hm</think>", {"content": "2 <think>hm</think>"}),
        (  # a call that is only thought of
            f"<think>{call('add', a=1, b=1)}</think>2",
            {"content": "2", "reasoning_content": call("add", a=1, b=1)},
        ),
    ],
)
def test_thoughts_are_no_content(turn, message):
    [rollout] = Play(lambda text: turn)().samples
    assert rollout.completion == [{"role": "assistant"} | message]
    assert rollout.env_mask == [1] * len(rollout.completion_ids)


def test_prompts_that_are_text():
    with pytest.raises(ValueError, match="prompt: expected messages with tools, got the text 'q'"):
        Play(then(""))({"prompt": "q"})


def test_the_beginning_of_a_conversation_is_rendered_once(monkeypatch):
    """And again when it has changed, as on the next day of a template that writes the date."""
    tokenizer, tools = make_tool_tokenizer("Monday" + TEMPLATE), schemas(make_toolbox([add]))
    template = ToolTemplate(tokenizer, {tokenizer.eos_token_id}, {})
    rendered, render = [], tokenizer.apply_chat_template

    def count(messages, **options):
        rendered.append(messages)
        return render(messages, **options)

    def answer(text: str, name: str = "add") -> str:
        message = {"role": "tool", "name": name, "content": text}
        encoded, start = template.results([message], tools, tokenizer.eos_token_id)
        return tokenizer.decode(encoded.ids[start:])

    monkeypatch.setattr(tokenizer, "apply_chat_template", count)
    renders = []
    for text in "123":
        if text == "3":
            tokenizer.chat_template = "Tuesday" + TEMPLATE
        assert answer(text) == f"\n<|start|>tool\n{text}<|end|>\n<|start|>assistant\n"
        renders.append(len(rendered))
    assert renders == [3, 4, 8]  # the third is rendered twice: the cached beginning is stale
    for number in range(300):  # tools that do not exist
        answer("1", f"add{number}")
    assert len(template._beginnings) <= 256
