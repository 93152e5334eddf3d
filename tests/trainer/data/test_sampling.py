from __future__ import annotations

from itertools import islice

import pytest
from datasets import Dataset, IterableDataset

from grpo_trainer.data import PromptStream, RepeatedStream, RepeatSampler


def numbers(size: int) -> Dataset:
    return Dataset.from_list([{"prompt": str(i)} for i in range(size)])


def streamed(size: int) -> IterableDataset:
    return numbers(size).to_iterable_dataset()


def taken(stream: PromptStream, count: int) -> list[int]:
    return [int(row["prompt"]) for row in stream.take(count)]


def test_order_without_shuffling():
    stream = PromptStream(numbers(5), prompts_per_batch=2)
    # prompt 4 fills no batch
    assert [taken(stream, 2) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_a_pass_has_every_prompt_once_and_the_next_another_order():
    stream = PromptStream(numbers(12), prompts_per_batch=3, seed=1)
    first, second = taken(stream, 12), taken(stream, 12)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert taken(PromptStream(numbers(12), 3, seed=1), 12) == first
    assert taken(PromptStream(numbers(12), 3, seed=4), 12) != first


@pytest.mark.parametrize("make", [numbers, streamed])
def test_restored_stream_goes_on_where_it_stood(make):
    stream = PromptStream(make(10), prompts_per_batch=4, seed=3)
    taken(stream, 11)  # over the end of a pass
    state = stream.state()
    rest = taken(stream, 9)
    other = PromptStream(make(10), prompts_per_batch=4, seed=3)
    other.restore(state)
    assert taken(other, 9) == rest


def test_streaming_dataset_is_read_in_its_order_again_and_again():
    assert taken(PromptStream(streamed(3), seed=1), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_shuffled_streaming_dataset_gets_a_new_epoch_with_every_pass():
    stream = PromptStream(streamed(20).shuffle(seed=1, buffer_size=20))
    first = taken(stream, 20)
    taken(stream, 5)
    restored = PromptStream(streamed(20).shuffle(seed=1, buffer_size=20))
    restored.restore(stream.state())
    second = taken(stream, 15)
    assert taken(restored, 15) == second
    assert sorted(first) == list(range(20)) and first[5:] != second


def test_nothing_to_take():
    with pytest.raises(ValueError, match="train_dataset: expected prompts, got an empty"):
        PromptStream(streamed(1).filter(lambda row: False)).take(1)


def test_evaluation_repeats_every_prompt():
    assert list(RepeatSampler(2, 3)) == [0, 0, 0, 1, 1, 1]
    assert len(RepeatSampler(2, 3)) == 6
    rows = islice(RepeatedStream(streamed(5), 2), 4)
    assert [row["prompt"] for row in rows] == ["0", "0", "1", "1"]
