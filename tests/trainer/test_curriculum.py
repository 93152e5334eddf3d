"""dynamic_prompts_fn: what is replaced, when, and what it must return."""

from __future__ import annotations

import copy
import datetime
import pickle

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from trainer_helpers import CannedEngine, logged, parameters

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.curriculum import Curriculum
from grpo_trainer.metrics import RolloutColumns
from grpo_trainer.sampling import PromptStream
from grpo_trainer.scored import Rollout, Scored

TWO_PROMPTS = {"per_device_train_batch_size": 8, "shuffle_dataset": False}


def harder(prompts, completions, rewards, metas):
    """The first prompt grows, the second makes room for the dataset's next."""
    return [f"9{prompts[0]}", None]


@pytest.fixture
def train(make_args, policy, tokenizer, dataset):
    """Trains, and says which prompts were trained on, with their answers."""

    def run(function, resume=None, **changes):
        seen = []

        def reward(prompts, answer, trainer_state, **kwargs):
            seen.append(list(zip(prompts[::4], answer[::4], strict=True)))
            return [float(row) for row, _ in enumerate(prompts)]

        args = make_args(dynamic_prompts_fn=function, **(TWO_PROMPTS | {"max_steps": 4} | changes))
        model, test = copy.deepcopy(policy), dataset.select(range(2))
        trainer = GRPOTrainer(model, reward, args, dataset, test, tokenizer)
        trainer._collector._rollouts = CannedEngine(tokenizer)
        trainer.train(resume_from_checkpoint=resume)
        return seen, trainer

    return run


# the dataset's prompts: 000=, 037=, 074=, 111=, 148=, ...; answers are their digits backwards


def test_prompts_are_replaced_with_their_columns(train):
    seen, _ = train(harder)
    assert seen == [
        [("000=", "000"), ("037=", "730")],
        [("9000=", "000"), ("074=", "470")],
        [("99000=", "000"), ("111=", "111")],
        [("999000=", "000"), ("148=", "841")],
    ]


def test_what_the_function_is_given(train):
    calls = []

    def record(prompts, completions, rewards, metas):
        calls.append(copy.deepcopy((prompts, completions, rewards, metas)))
        metas[0]["answer"] = prompts[0] = "changed"  # a copy
        return [None, None]

    seen, _ = train(record, max_steps=2)
    prompts, completions, rewards, metas = calls[0]
    assert prompts == ["000=", "037="] and rewards == [1.5, 5.5]
    assert metas == [{"answer": "000"}, {"answer": "730"}]
    assert [len(group) for group in completions] == [4, 4]
    assert all(isinstance(text, str) for group in completions for text in group)
    # None everywhere is the dataset's order
    assert seen[1] == [("074=", "470"), ("111=", "111")]
    assert len(calls) == 2


def test_once_per_generation_batch_and_never_in_evaluation(train):
    calls = []

    def record(prompts, completions, rewards, metas):
        calls.append(prompts)
        return prompts

    changes = {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1}
    train(record, max_steps=4, per_device_eval_batch_size=4, **changes)
    assert calls == [["000=", "037="]] * 2


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 3, "max_steps": 7}])
def test_resumed_run_is_the_straight_run(train, changes, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"} | changes
    _, straight = train(harder, **changes)
    _, resumed = train(harder, resume=str(tmp_path / "out" / "checkpoint-2"), **changes)
    assert logged(resumed) == logged(straight)
    assert torch.equal(parameters(resumed.model), parameters(straight.model))
    with pytest.raises(ValueError, match="a dynamic_prompts_fn = True, got False"):
        train(None, resume=str(tmp_path / "out" / "checkpoint-2"), **changes)


def test_dynamic_sampling_draws_from_the_dataset(make_args, policy, tokenizer, dataset):
    asked, given = [], []

    def reward(prompts, **kwargs):
        asked.append(prompts[::4])
        odd = [int(prompt[:-1]) % 2 for prompt in prompts]
        return [float(row * useful) for row, useful in enumerate(odd)]

    def stay(prompts, completions, rewards, metas):
        given.append(prompts)
        return prompts

    args = make_args(dynamic_sampling=True, max_steps=2, dynamic_prompts_fn=stay, **TWO_PROMPTS)
    trainer = GRPOTrainer(policy, reward, args, dataset, None, tokenizer)
    trainer._collector._rollouts = CannedEngine(tokenizer)
    trainer.train()
    assert given[0] == ["037=", "111="]  # those that are trained on
    assert asked == [["000=", "037="], ["074="], ["111="], ["037=", "111="]]


def test_messages_stay_messages(make_args, policy, chat_tokenizer, dataset):
    chat = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"][:-1]}]})
    seen = []

    def reward(prompts, **kwargs):
        seen.append(prompts[0][0]["content"])
        return [0.0] * len(prompts)

    def longer(prompts, completions, rewards, metas):
        return [[{"role": "user", "content": f"1{prompt[0]['content']}"}] for prompt in prompts]

    args = make_args(max_steps=2, shuffle_dataset=False, dynamic_prompts_fn=longer)
    GRPOTrainer(policy, reward, args, chat, processing_class=chat_tokenizer).train()
    assert seen == ["000", "1000"]


def ask(function, prompt="12=", **columns):
    rows = [{"prompt": prompt} | columns, {"prompt": prompt} | columns]
    curriculum = Curriculum(PromptStream(Dataset.from_list([{"prompt": "1="}])), function,
                            Accelerator(cpu=True))  # fmt: skip
    rollouts = [Rollout(prompt, [3], "4", [4], False, row=row) for row in rows]
    nothing = torch.zeros(2)
    scored = Scored(rollouts, torch.zeros(2, 1), RolloutColumns(nothing, nothing, nothing))
    curriculum.rewrite(scored, torch.tensor([torch.nan, 1.0]), 1)
    return curriculum


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["1="], "expected a list of 2 prompts, one per prompt, got 1"),
        (["1="] * 3, "got 3"),
        ("12", "got str"),
        (None, "got NoneType"),
        ([3, "1="], "expected text or None, as the prompt is that it replaces, got 3"),
        ([[{"role": "user", "content": "1"}]] * 2, "expected text or None"),
    ],
)
def test_wrong_answers(answer, message):
    with pytest.raises(ValueError, match=f"dynamic_prompts_fn: .*{message}"):
        ask(lambda *given: answer)


def test_other_errors():
    with pytest.raises(ValueError, match="expected messages or None, .* got 'text'"):
        ask(lambda *given: ["text"] * 2, prompt=[{"role": "user", "content": "1"}])
    with pytest.raises(RuntimeError, match="raised ZeroDivisionError: .* called with 2 prompts"):
        ask(lambda *given: 1 / 0)
    with pytest.raises(ValueError, match="which a checkpoint can hold, got date in 'day'"):
        ask(lambda prompts, *given: prompts, day=datetime.date.today())
    rewards = []
    assert ask(lambda p, c, r, m: rewards.extend(r) or p).take(2) == [{"prompt": "12="}] * 2
    assert rewards[0] != rewards[0] and rewards[1] == 1.0


def test_the_config_takes_a_function_or_its_path(make_args, train):
    path = "test_curriculum.harder"
    assert train(path, max_steps=2)[0] == train(harder, max_steps=2)[0]
    assert make_args(dynamic_prompts_fn=harder).to_dict()["dynamic_prompts_fn"] == path
    assert path in make_args(dynamic_prompts_fn=harder).to_json_string()
    local = make_args(dynamic_prompts_fn=lambda *given: given)  # which has no pickle
    assert "lambda" in pickle.loads(pickle.dumps(local)).dynamic_prompts_fn
    for wrong, message in (
        (3, "expected a function or its import path, got 3"),
        ("nowhere.at.all", "the module of 'nowhere.at.all' cannot be imported"),
        ("test_curriculum.nothing", "module 'test_curriculum' has no 'nothing'"),
        ("harder", "expected package.module.function, got 'harder'"),
    ):
        with pytest.raises(ValueError, match=f"dynamic_prompts_fn: {message}"):
            train(wrong)
    with pytest.raises(ValueError, match="dynamic_prompts_fn: .* with overlap_generation"):
        GRPOConfig(use_cpu=True, dynamic_prompts_fn=harder, overlap_generation=True)
