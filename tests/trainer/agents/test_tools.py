"""Tool calls: tokens, masks, messages, budgets and errors, against a policy that has a script."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import chain, takewhile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.tools import (
    PAIRS,
    Play,
    add,
    answers,
    call,
    make_tool_tokenizer,
    once,
    question,
    results,
    then,
)
from tests.support.trainer import MuteError

TURN = call("add", a=1, b=1)


def counts(sampled):
    stats = sampled.metrics.stats
    calls, failures = (stats[f"tools/{name}_frequency"] for name in ("call", "failure"))
    assert calls.count == len(sampled.samples) and failures.count == calls.total
    return int(calls.total), int(failures.total)


PIECES = st.sampled_from([*PAIRS, "1", "2", "x", " ", TURN])
TURNS = st.lists(st.lists(PIECES, max_size=4), max_size=2)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tool_tokenizer()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@example(rows=[[["12", TURN]]])
@given(rows=st.lists(TURNS, min_size=1, max_size=3))
def test_tokens_of_the_policy_are_kept_as_drawn(tokenizer, rows):
    """Encoding the text of earlier turns again would split a token that was drawn whole."""

    def drawn(pieces):
        whole = [tokenizer.convert_tokens_to_ids(piece) for piece in PAIRS]
        pieces = [*pieces, "<|end|>"]
        ids = [[whole[PAIRS.index(p)]] if p in PAIRS else tokenizer.encode(p) for p in pieces]
        return list(chain(*ids))

    # a row goes on for as long as its turns call the tool
    rows = [[*takewhile(lambda turn: TURN in turn, turns), ["x"]] for turns in rows]
    asked = [len(turns) for turns in rows]
    made = [0] * len(rows)

    def script(text):
        row = int(text.split("user\n")[1][0])
        made[row] += 1
        return drawn(rows[row][made[row] - 1])

    play = Play(script, tokenizer=tokenizer, max_completion_length=4096)
    sampled = play(*({"prompt": question(str(row))} for row in range(len(rows))))
    assert made == asked  # a row ends when it ends
    assert [len(prompts) for prompts, _ in play.engine.asked] == [
        sum(count > step for count in asked) for step in range(max(asked))
    ]
    for rollout, turns in zip(sampled.samples, rows, strict=True):
        pairs = zip(rollout.completion_ids, rollout.by_policy, strict=True)
        assert [token for token, own in pairs if own] == list(chain(*map(drawn, turns)))
        assert len(answers(rollout)) == sum(turn.count(TURN) for turn in turns)
    for prompts, room in play.engine.asked:
        starts = [rollout.prompt_ids + rollout.completion_ids for rollout in sampled.samples]
        assert all(any(ids == whole[: len(ids)] for whole in starts) for ids in prompts)
        prompt = min(len(rollout.prompt_ids) for rollout in sampled.samples)
        assert room <= 4096 - (min(map(len, prompts)) - prompt)


def test_async_tools_run_together_and_answers_keep_their_order():
    both = asyncio.Event()

    async def first() -> str:
        """Wait for the second."""
        await both.wait()
        return "one"

    async def second() -> str:
        """Let the first go on."""
        both.set()
        return "two"

    turn = call("first") + TURN + call("second")
    play = Play(once(turn), tools=(add, first, second))
    [rollout] = play().samples
    assert answers(rollout) == ["one", "2", "two"]


# what a tool raises -> what the policy is told
RAISED = [
    (KeyError("x"), "'x'"), (SystemExit("bye"), "bye"), (GeneratorExit("x"), "x"),
    (asyncio.CancelledError("x"), "x"), (MuteError(), "MuteError"), (BaseException("x"), "x"),
    (ValueError("\ud800"), "\ud800"), (KeyboardInterrupt("x"), "x"),
]  # fmt: skip


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("error", "told"), RAISED)
def test_whatever_a_tool_raises_is_an_answer(error, told, is_async, timeout):
    def fails() -> str:
        """Fail."""
        raise error

    async def later() -> str:
        """Fail later."""
        raise error

    tool = later if is_async else fails
    turn = "".join([call(tool.__name__), call("missing"), call("add", a=1), TURN])
    play = Play(once(turn), (add, tool), tool_timeout=timeout, max_completion_length=900)
    if isinstance(error, KeyboardInterrupt) and not is_async and timeout is None:
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C
            play()
        return
    sampled = play()
    first, second, third, last = answers(sampled.samples[0])
    assert first == str({"error": told}) and last == "2" and counts(sampled) == (4, 3)
    assert second == "{'error': 'Tool missing not found.'}"
    assert "missing 1 required positional argument: 'b'" in third


def test_half_a_surrogate_pair():
    def echo(text: str) -> str:
        """Say it.

        Args:
            text: what.
        """
        assert text.encode()
        return "\ud801"

    turn = call("echo", text="\ud800") + call("\udfff", a="\ud800")
    [rollout] = Play(once(turn), tools=(echo,))().samples
    assert answers(rollout) == ["\\ud801", "{'error': 'Tool \\\\udfff not found.'}"]
    json.dumps(rollout.completion, ensure_ascii=False).encode()


def look(value, is_async):
    """Return a tool ``look`` that answers ``value``."""

    def look() -> object:
        """Look."""
        return value

    async def look_later() -> object:
        """Look."""
        return value

    look_later.__name__ = "look"
    return look_later if is_async else look


def block(kind, value):
    return {"type": kind, kind: value}


# what a tool returns -> what the policy is told
RETURNED = [
    ([], "[]"),
    ([1, {"type": []}], "[1, {'type': []}]"),
    ([block("text", "a"), block("audio", "b.wav")], None),
    ([block("text", "a"), block("text", "\ud800")], "a\\ud800"),
    ([block("image", "/no/such.png")], "expected an open PIL image, got '/no/such.png'"),
    ([block("image", "http://no.such/x.png")], "expected an open PIL image, got 'http"),
    ([{"type": "image"}], "expected an open PIL image, got None"),
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("value", "told"), RETURNED)
def test_what_is_no_image_is_text(value, told, is_async):
    sampled = Play(once(call("look")), (look(value, is_async),))()
    [answer] = answers(sampled.samples[0])
    assert (str(value) if told is None else told) in answer
    assert counts(sampled) == (1, int("'error'" in answer))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_an_image_for_a_policy_that_takes_none(several, is_async):
    image = Image.new("RGB", (4, 4))
    value = [block("text", "see"), block("image", image)] if several else image
    with pytest.raises(ValueError, match="tools: expected no image from 'look', since the policy"):
        Play(once(TURN + call("look")), (add, look(value, is_async)))()


def test_time_limit():
    release = threading.Event()

    def hangs() -> str:
        """Block forever."""
        release.wait()
        return "late"

    async def waits() -> str:
        """Block forever, too."""
        await asyncio.Event().wait()
        return ""

    turn = call("hangs") + call("waits") + TURN
    script, tools = (once(turn)), (add, hangs, waits)
    play = Play(script, tools, tool_timeout=0.05)
    try:
        sampled = play()
    finally:
        release.set()
    late = "{'error': 'No answer within 0.05 seconds.'}"
    assert answers(sampled.samples[0]) == [late, late, "2"] and counts(sampled) == (3, 2)


@pytest.mark.parametrize("limit", [0, 2])
def test_iterations_are_limited(limit):
    sampled = Play(lambda text: TURN, max_tool_calling_iterations=limit)()
    [rollout] = sampled.samples
    roles = [message["role"] for message in rollout.completion]
    assert roles == ["assistant", "tool"] * limit + ["assistant"]
    assert rollout.completion[-1]["tool_calls"][0]["function"]["name"] == "add"
    assert counts(sampled) == (limit, 0) and not rollout.truncated


def test_an_answer_that_leaves_no_room_is_rolled_back():
    script = then(TURN, "ok")
    whole = Play(script)().samples[0]
    answer_ends = len(whole.env_mask) - whole.env_mask[::-1].index(0)
    called = whole.env_mask.index(0)
    # one token of room is enough to go on, none is not
    [rollout] = Play(script, max_completion_length=answer_ends + 1)().samples
    assert rollout.completion_ids == whole.completion_ids[: answer_ends + 1]
    assert rollout.truncated and rollout.completion[-1] == {"role": "assistant", "content": "o"}
    sampled = Play(script, max_completion_length=answer_ends)()
    [rollout] = sampled.samples
    assert rollout.completion_ids == whole.completion_ids[:called]
    assert rollout.env_mask == [1] * called and rollout.truncated
    assert [message["role"] for message in rollout.completion] == ["assistant"]
    assert counts(sampled) == (1, 0)  # it was called


def test_a_turn_that_is_cut_calls_nothing(tokenizer):
    length = len(tokenizer.encode(TURN))
    sampled = Play(lambda text: TURN, max_completion_length=length)()
    assert sampled.samples[0].truncated and counts(sampled) == (0, 0)
    assert "tool_calls" in sampled.samples[0].completion[0]


def test_turns_stay_within_the_positions():
    """The longest conversation bounds a step; what that cuts goes on in the next one."""

    def script(text):
        if "long" in text:
            return "ok" if results(text) else TURN
        return "y" * 150 if results(text) else "x" * 20 + TURN

    rows = [{"prompt": question("long" * 30)}, {"prompt": question("s")}]
    play = Play(script, context=400, max_completion_length=230)
    sampled = play(*rows)
    assert all(max(map(len, ids)) + step <= 400 for ids, step in play.engine.asked)
    alone = [Play(script, max_completion_length=230)(row).samples[0] for row in rows]
    assert [r.completion_ids for r in sampled.samples] == [r.completion_ids for r in alone]


@pytest.mark.parametrize(
    "turn",
    [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        TURN + "<tool_call>{</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 1000 + "</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_text(turn):
    sampled = Play(lambda text: turn, max_completion_length=2000)()
    assert sampled.samples[0].completion == [{"role": "assistant", "content": turn}]
    assert counts(sampled) == (0, 0)
