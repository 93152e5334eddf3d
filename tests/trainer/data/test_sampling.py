from __future__ import annotations

from itertools import islice

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.data import PromptStream, RepeatedStream, repeated


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


def test_nothing_to_take():
    with pytest.raises(ValueError, match="train_dataset: expected prompts, got an empty"):
        PromptStream(streamed(1).filter(lambda row: False)).take(1)


def test_evaluation_repeats_every_prompt():
    assert list(repeated(range(2), 3)) == [0, 0, 0, 1, 1, 1]
    rows = islice(RepeatedStream(streamed(5), 2), 4)
    assert [row["prompt"] for row in rows] == ["0", "0", "1", "1"]
