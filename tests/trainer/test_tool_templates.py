"""Which tools and chat templates can be used, and what becomes of the others."""

from __future__ import annotations

import pytest
from tool_helpers import TEMPLATE, Play, add, call, make_tool_tokenizer, then

from grpo_trainer.tools import make_toolbox


def test_a_response_template_reads_calls():
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "<tool_call>{{ call.function | tojson }}</tool_call>",
        "[{{ call.function.name }}:{{ call.function.arguments | tojson }}]",
    )
    with pytest.raises(ValueError, match="a form of its own; set the tokenizer's response_templ"):
        Play(then(""), tokenizer=tokenizer)
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
    [rollout] = play().rollouts
    contents = [message["content"] for message in rollout.completion]
    assert contents == ["so", "3", "three"]
    [rollout] = Play(lambda text: "[add:{]", tokenizer=tokenizer)().rollouts
    assert rollout.completion == [{"role": "assistant", "content": "[add:{]"}]


def no_hint(a) -> int:
    """Adds.

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
        ([add, add], "tools: expected different names, got 'add' twice"),
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
        (TEMPLATE.replace("call.function", "''"), "got one that leaves tool calls out"),
        (TEMPLATE.replace("m.content", "m.content if m.role == 'user'"), "leaves the results"),
        ("{{ raise_exception('no roles') }}", "got one that fails: no roles"),
        (TEMPLATE.replace("m.role", "m.role ~ loop.revindex"), "writes earlier turns differently"),
    ],
)
def test_templates_without_tools(template, message):
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"processing_class: .*{message}"):
        Play(then(""), tokenizer=tokenizer)


def test_templates_that_write_empty_thoughts_into_the_last_turn():
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = THINKS
    play = Play(then("[]" + call("add", a=1, b=1), "2"), tokenizer=tokenizer)
    [rollout] = play().rollouts
    assert "<|end|>\n<|start|>tool\n2<|end|>\n<|start|>assistant\n2" in play.text(
        rollout.completion_ids
    )


def test_prompts_that_are_text():
    with pytest.raises(ValueError, match="prompt: expected messages with tools, got the text 'q'"):
        Play(then(""))({"prompt": "q"})
