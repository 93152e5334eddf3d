"""Prompts: their tokens, the order in which they are drawn, and the micro-batches made of them."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels import LossConfig, linear_policy_loss
from grpo_trainer.data import (
    Divisors,
    MicroBatch,
    PromptStream,
    RepeatedStream,
    Sample,
    collate,
    decode_completions,
    encode_prompts,
    repeated,
)
from grpo_trainer.engines import Sampling
from tests.support.host_reads import counted_reads
from tests.support.trainer import generating


def test_plain_and_conversational(chat_tokenizer):
    user = {"role": "user", "content": "12"}
    started = [user, {"role": "assistant", "content": "=2"}]
    ids = [made.ids for made in encode_prompts(["12=", [user], started, "12="], chat_tokenizer)]
    assert ids[0] == ids[1] == ids[3] == chat_tokenizer("12=")["input_ids"]
    assert ids[2] == chat_tokenizer("12=2")["input_ids"]
    assert encode_prompts(["12="], chat_tokenizer, max_length=2)[0].ids == ids[0][-2:]
    texts = decode_completions([ids[0][:2], ids[0][:1]], ["12=", [user]], chat_tokenizer)
    assert texts == ["12", [{"role": "assistant", "content": "1"}]]


USER = {"role": "user", "content": "12"}


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (3, "got int"),
        ([], "got an empty list"),
        ("", "got none"),
        (["12"], "got str among messages"),
        ([USER, {"content": "1"}], "got a message without role"),
        ([USER, {"role": "user", "text": "1"}], "got a message without content"),
        ([{"role": "user", "content": None}], "got a message without content"),
        ([{}], "got a message without role and content"),
        ("1" * 300 + "\ud800=", r"got '\\ud800', half of a surrogate pair, as character 300"),
        ([{"role": "user", "content": "\udc00"}], r"got '\\udc00', .* as character 0 of '\\udc00="),
        ([USER, {"role": "assistant", "tool_calls": [{}]}], r"the chat template fails on \[\{"),
        ([USER], "the chat template fails on .*: no users"),
        ([USER], r"expected text, since the tokenizer of '.*' has no chat template, got \[\{"),
    ],
)
def test_wrong_prompts(chat_tokenizer, prompt, got):
    if "no users" in got:
        chat_tokenizer.chat_template = "{{ raise_exception('no users') }}"
    if "no chat template" in got:
        chat_tokenizer.chat_template = None
    with pytest.raises(ValueError, match=f"prompt: .*{got}"):
        encode_prompts([prompt], chat_tokenizer)


def test_wrong_prompts_name_their_row(make_trainer, dataset):
    trainer = make_trainer(shuffle_dataset=False)
    for name in ("train_dataset", "eval_dataset"):
        wrong = Dataset.from_list([{"prompt": [], "answer": "this one"}] * 4)
        setattr(trainer, name, wrong)
        with pytest.raises(ValueError, match="prompt: .* got an empty list in the row .*this one"):
            trainer.train() if name == "train_dataset" else trainer.evaluate()


def test_tokens_without_an_embedding(make_trainer, tokenizer):
    tokenizer.add_tokens(["!"])
    for prompt in ("12=", "12!"):  # the tokenizer may have more, as long as nobody uses them
        rows = Dataset.from_list([{"prompt": prompt}] * 4)
        trainer = make_trainer(lambda completions, **kwargs: [1.0] * 4, train_dataset=rows)
        if prompt == "12=":
            trainer.train()
    with pytest.raises(ValueError, match="prompt: expected ids below 14, .* got 14 from '12"):
        trainer.train()


def test_engine_does_not_see_the_padding(policy, tokenizer, make_args):
    """Greedy completions of a batch of unequal prompts are those of each prompt alone."""
    args = make_args(generation_kwargs={"do_sample": False}, max_completion_length=8)
    policy.train()
    engine, sampling = (
        generating(policy, tokenizer),
        Sampling.from_config(args, tokenizer),
    )
    prompts = [made.ids for made in encode_prompts(["123=", "4=", "98765="], tokenizer)]
    together = engine.generate(prompts, sampling).token_ids
    assert together == [engine.generate([prompt], sampling).token_ids[0] for prompt in prompts]
    assert policy.training


def numbers(size: int) -> Dataset:
    return Dataset.from_list([{"prompt": str(i)} for i in range(size)])


def streamed(size: int) -> IterableDataset:
    return numbers(size).to_iterable_dataset()


def taken(stream: PromptStream, count: int) -> list[int]:
    return [int(row["prompt"]) for row in stream.take(count)]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(8, 20), st.integers(1, 4), st.integers(0, 9), st.integers(0, 32))
def test_a_pass_is_a_permutation_and_the_next_another(size, batch, seed, stop):
    """Of as many prompts as fill batches; a run that is resumed anywhere goes on in it."""
    length = size - size % batch
    stream = PromptStream(numbers(size), batch, seed)
    shuffled = taken(stream, 4 * length)
    passes = [shuffled[i * length : (i + 1) * length] for i in range(4)]
    for found in passes:
        assert len(set(found)) == length and set(found) <= set(range(size))
    assert len(set(map(tuple, passes))) == 4
    other = PromptStream(numbers(size), batch, seed + 1)
    assert taken(other, length) != passes[0]
    plain = PromptStream(numbers(size), batch)
    assert taken(plain, 2 * length) == 2 * [*range(length)]
    flowing = PromptStream(streamed(size), batch)  # in its own order, with no end
    assert taken(flowing, 4 * size) == 4 * [*range(size)]
    mixed = taken(PromptStream(streamed(size), batch, seed), 4 * size)
    passes = [mixed[i * size : (i + 1) * size] for i in range(4)]
    assert [sorted(found) for found in passes] == 4 * [[*range(size)]]
    assert len(set(map(tuple, passes))) == 4
    for make, whole in ((numbers, shuffled), (streamed, mixed)):
        started, restored = (PromptStream(make(size), batch, seed) for _ in range(2))
        assert taken(started, stop) == whole[:stop]
        restored.restore(started.state())
        assert taken(restored, 4 * length - stop) == whole[stop : 4 * length]


def test_shuffled_streaming_dataset_gets_a_new_epoch_with_every_pass():
    stream = PromptStream(streamed(20).shuffle(seed=1, buffer_size=20))
    first = taken(stream, 20)
    taken(stream, 5)
    restored = PromptStream(streamed(20).shuffle(seed=1, buffer_size=20))
    restored.restore(stream.state())
    second = taken(stream, 15)
    assert taken(restored, 15) == second
    assert sorted(first) == list(range(20)) and first[5:] != second


def test_a_stream_of_a_checkpoint_of_version_1_0_goes_on_in_its_own_order():
    stream = PromptStream(streamed(20), seed=1)
    assert taken(stream, 5) != [*range(5)]
    stream.restore({"epoch": 0, "offset": 5})
    rows = stream.take(15)
    assert [row.number for row in rows] == [int(row["prompt"]) for row in rows] == [*range(5, 20)]
    assert stream.state() == {"epoch": 0, "offset": 20, "shuffled": False}


def test_the_ends_of_streams():
    with pytest.raises(ValueError, match="train_dataset: expected prompts, got an empty"):
        PromptStream(streamed(1).filter(lambda row: False)).take(1)
    assert list(repeated(range(2), 3)) == [0, 0, 0, 1, 1, 1]
    rows = islice(RepeatedStream(streamed(5), 2), 4)
    assert [row["prompt"] for row in rows] == ["0", "0", "1", "1"]


NONE = {"lengths": None, "active_lengths": None}


def collated(per_token: bool = False) -> MicroBatch:
    """Return completions of which one has an answer of a tool, and one is left out."""
    samples = [
        Sample("", [1, 2], completion_ids=[3, 4, 5], env_mask=[1, 0, 1]),
        Sample("", [1], completion_ids=[6, 7]),
        Sample("", [1, 2, 3], completion_ids=[8], left_out=True),
        Sample("", [1, 2], completion_ids=[9, 4]),
    ]
    advantages = torch.tensor([1.0, 0.0, 2.0, -1.0])
    if per_token:
        advantages = advantages[:, None] * torch.tensor([[1.0, 0.0, 0.0]])
    return collate(
        samples, advantages, Divisors(torch.tensor(6.0), torch.tensor(6.0)), pad_token_id=0
    )


@pytest.mark.parametrize("per_token,active", [(False, [2, 0, 0, 2]), (True, [1, 0, 0, 1])])
def test_the_host_knows_the_counts(per_token: bool, active: list[int]) -> None:
    batch = collated(per_token)
    assert (batch.lengths, batch.active_lengths) == ([2, 2, 0, 2], active)
    told, read = (one.token_batch(2) for one in (batch, MicroBatch(**vars(batch) | NONE)))
    assert (told.lengths, told.active_lengths) == (read.lengths, read.active_lengths)


@pytest.mark.parametrize("known", (False, True))
def test_a_step_reads_nothing_that_the_host_knows(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    batch = collated()
    batch = batch if known else MicroBatch(**vars(batch) | NONE)
    hidden = torch.randn(*batch.target.shape, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    with counted_reads(monkeypatch) as reads:
        tokens = batch.token_batch(2)
        linear_policy_loss(hidden, weight, tokens, LossConfig()).loss.backward()
    assert reads == ([] if known else ["cpu"])


def test_wrong_counts_are_an_error() -> None:
    batch = MicroBatch(**vars(collated()) | {"lengths": [2, 2, 1, 2]})
    with pytest.raises(ValueError, match="^lengths: expected"):
        batch.token_batch(1)
