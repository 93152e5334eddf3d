"""Which prompts come next: by dynamic_prompts_fn, and where groups have nothing to teach."""

from __future__ import annotations

import copy
import datetime
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from grpo_trainer import GRPOConfig
from grpo_trainer.data import Sample
from grpo_trainer.experience import Curriculum
from tests.support.trainer import BackgroundEngine, CannedEngine, MuteError

TWO_PROMPTS = {"per_device_train_batch_size": 8, "shuffle_dataset": False}
MESSAGES = [{"role": "user", "content": "1"}]


def hint(prompts, completions, rewards, metas):
    """Prefix prompts that went badly with one number, those that went well with another."""
    numbers = [1 if reward < 3.5 else 2 for reward in rewards]
    return [f"{number}{prompt}" for number, prompt in zip(numbers, prompts, strict=True)]


@pytest.fixture
def train(make_trainer, tokenizer, dataset):
    """Train; return the prompts of each batch, with their answers: their last digits backwards."""

    def run(function, resume=None, **changes):
        seen = []

        def reward(prompts, answer, **kwargs):
            assert answer == [prompt[-4:-1][::-1] for prompt in prompts]
            seen.append(" ".join(prompts[::4]))
            return [float(row) for row, _ in enumerate(prompts)]

        settings = {"max_steps": 4, "eval_dataset": dataset.select(range(2))} | TWO_PROMPTS
        trainer = make_trainer(
            reward, engine=BackgroundEngine(tokenizer), dynamic_prompts_fn=function,
            **settings | changes,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return seen

    return run


# the prompts of the steps of hint; rewards are 0 to 3, and 4 to 7
STEPS = ["000= 037=", "1000= 2037=", "074= 111=", "1074= 2111=", "148= 185="]


def test_which_prompts_come_next(train):
    assert train(hint, max_steps=len(STEPS)) == STEPS


def test_what_a_function_is_given(train):
    """Copies of the dataset's prompts with their rows, one for each sample."""
    calls = []

    def record(prompts, completions, rewards, metas):
        calls.append(copy.deepcopy((prompts, completions, rewards, metas)))
        metas[0]["answer"] = prompts[0] = "changed"
        return [f"1{calls[-1][0][0]}"] * (len(metas) // 2) + [None] * (len(metas) // 2)

    seen = train(record, max_steps=2)
    assert seen == ["000= 037=", "1000= 074="]
    first, second = {"answer": "000"}, {"answer": "730"}
    (prompts, completions, rewards, metas), (later, *_, after) = calls
    assert prompts == ["000="] * 4 + ["037="] * 4 and rewards == [*map(float, range(8))]
    assert metas == [first | {"prompt": "000="}] * 4 + [second | {"prompt": "037="}] * 4
    assert later == ["000="] * 4 + ["074="] * 4 and after[0]["prompt"] == "1000="
    assert len(completions) == 8 and all(isinstance(text, str) for text in completions)


@pytest.mark.parametrize(
    ("returned", "following"),
    [
        (["1=", "2=", "2=", "1="], "1="),
        (["1=", "2=", "2=", "3="], "2="),
        (["1=", None, None, "3="], "037="),
        (["000=", "000=", "2=", "2="], "037="),  # the dataset's own
        ([MESSAGES, None, MESSAGES, MESSAGES], MESSAGES),
    ],
)
def test_what_most_samples_of_a_prompt_got(returned, following):
    prompt = [{"role": "user", "content": "0"}] if following is MESSAGES else "000="
    curriculum = ask(lambda *given: returned, prompt=prompt, group_size=4)
    assert curriculum.rows(1) == [{"prompt": following}]


def test_once_per_generation_batch_and_never_in_evaluation(train):
    calls = []

    def record(prompts, completions, rewards, metas):
        calls.append(prompts[::4])
        return prompts

    changes = {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1}
    train(record, max_steps=4, per_device_eval_batch_size=4, **changes)
    assert calls == [["000=", "037="], ["074=", "111="]]


def test_dynamic_sampling_draws_from_the_dataset(make_trainer, tokenizer):
    asked, given = [], []

    def reward(prompts, **kwargs):
        asked.append(prompts[::4])
        odd = [int(prompt[:-1]) % 2 for prompt in prompts]
        return [float(row * useful) for row, useful in enumerate(odd)]

    def record(prompts, completions, rewards, metas):
        given.append(prompts[::4])
        return [f"1{prompt}" for prompt in prompts]

    changes = {"dynamic_sampling": True, "max_steps": 2} | TWO_PROMPTS
    engine = BackgroundEngine(tokenizer)
    make_trainer(reward, engine=engine, dynamic_prompts_fn=record, **changes).train()
    assert given[0] == ["037=", "111="]  # those that are trained on
    assert asked == [["000=", "037="], ["074="], ["111="], ["1037=", "1111="]]


def ask(function, prompt="12=", group_size=1, **columns):
    """Return a curriculum that asked ``function`` after two prompts, or after one's samples."""
    count = max(group_size, 2)
    args = GRPOConfig(use_cpu=True, report_to="none", dynamic_prompts_fn=function)
    args.num_generations = args.generation_batch_size = group_size  # a run has at least two
    curriculum = Curriculum(Dataset.from_list([{"prompt": "037="}]), args, Accelerator(cpu=True))
    row = {"prompt": prompt} | columns
    samples = [Sample(prompt, [3], "4", [4], False, row=dict(row)) for _ in range(count)]
    totals = torch.tensor([torch.nan] + [1.0] * (count - 1))
    curriculum.scored(SimpleNamespace(samples=samples, compared=SimpleNamespace(rewards=totals)))
    return curriculum


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["1="], "expected a list of 2 prompts, one per completion, got 1"),
        (["1="] * 3, "got 3"),
        ("12", "got str"),
        (None, "got NoneType"),
        ([3, "1="], "expected text or None, like the prompt that it replaces, got 3"),
        ([MESSAGES] * 2, "expected text or None"),
    ],
)
def test_wrong_answers(answer, message):
    with pytest.raises(ValueError, match=f"dynamic_prompts_fn: .*{message}"):
        ask(lambda *given: answer)


def test_other_errors():
    with pytest.raises(ValueError, match="expected messages or None, .* got 'text'"):
        ask(lambda *given: ["text"] * 2, prompt=MESSAGES)
    with pytest.raises(RuntimeError, match="raised ZeroDivisionError: .* called with 2 prompts"):
        ask(lambda *given: 1 / 0)

    def mute(*given):
        raise MuteError

    with pytest.raises(RuntimeError, match="raised MuteError: MuteError; it was called with 2"):
        ask(mute)
    with pytest.raises(
        ValueError, match="column 'day': expected .*which a checkpoint can hold, got date"
    ):
        ask(lambda *given: ["1="] * 2, day=datetime.date.today())
    rewards = []
    assert ask(lambda p, c, r, m: rewards.extend(r) or ["1="] * 2).rows(2) == [{"prompt": "1="}] * 2
    assert rewards[0] != rewards[0] and rewards[1] == 1.0


PATH = f"{__name__}.hint"


def test_the_config_takes_a_function_or_its_path(make_args, train):
    assert train(PATH, max_steps=2) == STEPS[:2]
    assert make_args(dynamic_prompts_fn=hint).to_dict()["dynamic_prompts_fn"] == PATH
    assert PATH in make_args(dynamic_prompts_fn=hint).to_json_string()
    local = make_args(dynamic_prompts_fn=lambda *given: given)  # which has no pickle
    assert "lambda" in pickle.loads(pickle.dumps(local)).dynamic_prompts_fn


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (3, {}, "fn: expected a function or its import path, got 3"),
        ("nowhere.at.all", {}, "fn: module 'nowhere.at' cannot be imported"),
        (f"{__name__}.nothing", {}, f"fn: module '{__name__}' has no 'nothing'"),
        ("hint", {}, "fn: expected package.module.function, got 'hint'"),
        (hint, {"generation_batches_ahead": 1}, "fn: .* with generation_batches_ahead"),
    ],
)
def test_wrong_settings(train, function, changes, message):
    with pytest.raises(ValueError, match=f"dynamic_prompts_{message}"):
        train(function, **changes)


# dynamic sampling


@pytest.fixture
def train_on(make_trainer):
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


def test_missing_groups_are_drawn_from_the_next_prompts(train_on):
    trainer, drawn, counts, log = train_on(lambda number: number % 2 == 1)
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


def test_nothing_is_drawn_when_all_groups_differ(train_on):
    _, drawn, counts, _ = train_on(lambda number: True)
    assert len(drawn) == 1 and counts == [0, 0, 0]


def test_after_the_last_round_groups_without_variance_fill_the_batch(train_on):
    trainer, drawn, counts, _ = train_on(lambda number: number == 37, max_resampling_rounds=2)
    assert drawn[1:] == [["148", "185", "222"], ["259", "296", "333"]]
    assert counts == [2, 6, 3]
    [batch] = trainer._buffer.batches
    assert (batch.advantages != 0).tolist() == [True, True] + [False] * 6


def test_the_next_batch_goes_on_after_the_last_prompt_drawn(train_on):
    _, drawn, *_ = train_on(lambda number: number % 2 == 1, max_steps=2)
    assert drawn[4][0] == "296"
