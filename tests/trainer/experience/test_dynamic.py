from __future__ import annotations

import pytest

from tests.support.trainer import CannedEngine


@pytest.fixture
def train(make_trainer):
    """Train on prompts of which ``useful`` says which tell their completions apart."""

    def run(useful, **changes):
        drawn = []

        def reward(prompts, completion_ids, **kwargs):
            drawn.append([prompt[:-1] for prompt in prompts[::2]])
            return [
                float(row % 2 and useful(int(prompt[:-1]))) for row, prompt in enumerate(prompts)
            ]

        settings = {
            "dynamic_sampling": True,
            "num_generations": 2,
            "shuffle_dataset": False,
            "per_device_train_batch_size": 8,
            "max_steps": 1,
        }
        trainer = make_trainer(reward, **(settings | changes), engine=CannedEngine())
        trainer.train()
        [log] = [row for row in trainer.state.log_history if "loss" in row][-1:]
        names = ("resampling_rounds", "discarded_groups", "unfilled_groups")
        counts = [log[f"dynamic_sampling/{name}"] for name in names]
        return trainer, drawn, counts, log

    return run


# the dataset's prompts: 0, 37, 74, 111, 148, 185, 222, 259, 296, 333, 370, ...


def test_missing_groups_are_drawn_from_the_next_prompts(train):
    trainer, drawn, counts, log = train(lambda number: number % 2 == 1)
    assert drawn == [["000", "037", "074", "111"], ["148", "185"], ["222"], ["259"]]
    assert counts == [3, 4, 0]
    [batch] = trainer._buffer.batches
    # 37, 111, 185 and 259, by the digits of the prompts
    first = [trainer.processing_class.decode(ids[:3]) for ids in batch.input_ids[::2]]
    assert [text.replace(" ", "") for text in first] == ["037", "111", "185", "259"]
    assert batch.advantages.abs().min() > 0.1
    # what was generated counts, not only what was trained on
    assert log["frac_reward_zero_std"] == pytest.approx(0.5)
    assert log["reward"] == pytest.approx(0.25)
    assert log["num_tokens"] > int(batch.attention_mask.sum())


def test_nothing_is_drawn_when_all_groups_differ(train):
    _, drawn, counts, _ = train(lambda number: True)
    assert len(drawn) == 1 and counts == [0, 0, 0]


def test_after_the_last_round_groups_without_variance_fill_the_batch(train):
    trainer, drawn, counts, _ = train(lambda number: number == 37, max_resampling_rounds=2)
    assert drawn[1:] == [["148", "185", "222"], ["259", "296", "333"]]
    assert counts == [2, 6, 3]
    [batch] = trainer._buffer.batches
    assert (batch.advantages != 0).tolist() == [True, True] + [False] * 6


def test_the_next_batch_goes_on_after_the_last_prompt_drawn(train):
    _, drawn, *_ = train(lambda number: number % 2 == 1, max_steps=2)
    assert drawn[4][0] == "296"
