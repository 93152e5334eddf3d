"""dynamic_prompts_fn: what is replaced, when, and what it must return."""

from __future__ import annotations

import copy
import datetime
import pickle

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from grpo_trainer import GRPOConfig
from grpo_trainer.data import Curriculum, PromptStream, Rollout
from tests.support.trainer import canned, logged, parameters

TWO_PROMPTS = {"per_device_train_batch_size": 8, "shuffle_dataset": False}
GROUPS = {"dynamic_prompts_form": "groups"}


def harder(prompts, completions, rewards, metas):
    """Let the first prompt grow; the second makes room for the dataset's next."""
    return [f"9{prompts[0]}", None]


def hint(prompts, completions, rewards, metas):
    """Prefix prompts that went badly with one number, those that went well with another."""
    numbers = [1 if reward < 3.5 else 2 for reward in rewards]
    return [f"{number}{prompt}" for number, prompt in zip(numbers, prompts, strict=True)]


@pytest.fixture
def train(make_trainer, policy, dataset):
    """Train; say which prompts were trained on, with their answers."""

    def run(function, resume=None, **changes):
        seen = []

        def reward(prompts, answer, trainer_state, **kwargs):
            seen.append(list(zip(prompts[::4], answer[::4], strict=True)))
            return [float(row) for row, _ in enumerate(prompts)]

        settings = (
            {"max_steps": 4, "eval_dataset": dataset.select(range(2))} | TWO_PROMPTS | changes
        )
        model = copy.deepcopy(policy)
        trainer = canned(make_trainer(reward, model, dynamic_prompts_fn=function, **settings))
        trainer.train(resume_from_checkpoint=resume)
        return seen, trainer

    return run


# the dataset's prompts: 000=, 037=, 074=, 111=, 148=, ...; answers are their digits backwards


def test_rewritten_prompts_come_next_and_the_dataset_goes_on(train):
    """The rewards of the first prompt are 0 to 3, those of the second 4 to 7."""
    seen, _ = train(hint, max_steps=5)
    assert seen == [
        [("000=", "000"), ("037=", "730")],
        [("1000=", "000"), ("2037=", "730")],
        [("074=", "470"), ("111=", "111")],
        [("1074=", "470"), ("2111=", "111")],
        [("148=", "841"), ("185=", "581")],
    ]


def test_what_a_function_of_samples_is_given(train):
    calls = []

    def record(prompts, completions, rewards, metas):
        calls.append(copy.deepcopy((prompts, completions, rewards, metas)))
        metas[0]["answer"] = metas[1]["prompt"] = "changed"  # a copy
        return [*["1" + prompt for prompt in prompts[:4]], None, *prompts[5:]]

    seen, _ = train(record, max_steps=2)
    (prompts, completions, rewards, metas), (later, *_, after) = calls
    assert prompts == ["000="] * 4 + ["037="] * 4 and rewards == [*map(float, range(8))]
    assert len(completions) == 8 and all(isinstance(text, str) for text in completions)
    assert (
        metas
        == [{"prompt": "000=", "answer": "000"}] * 4 + [{"prompt": "037=", "answer": "730"}] * 4
    )
    # the second prompt was returned as it is, so the dataset goes on in its place
    assert seen[1] == [("1000=", "000"), ("074=", "470")]
    assert later == ["000="] * 4 + ["074="] * 4  # the dataset's prompts
    assert after[0] == {"prompt": "1000=", "answer": "000"}  # and what was completed


@pytest.mark.parametrize(
    ("returned", "following"),
    [
        (["1=", "2=", "2=", "1="], "1="),
        (["1=", "2=", "2=", "3="], "2="),
        (["1=", None, None, "3="], "037="),
        (["000=", "000=", "2=", "2="], "037="),  # the dataset's own
    ],
)
def test_what_most_samples_of_a_prompt_got(train, returned, following):
    changes = {"per_device_train_batch_size": 4, "max_steps": 2}
    seen, _ = train(lambda *given: returned, **changes)
    assert [prompt for [(prompt, _)] in seen] == ["000=", following]


def curriculum_fn(prompts, completions, rewards, metas):
    new_prompts = []
    for p, r in zip(prompts, rewards, strict=True):
        if r < 0:
            # low reward, add a hint
            new_prompts.append(p + " // Hint: check your color setup in GLSL")
        else:
            # high reward, increase difficulty
            new_prompts.append(p + " // Next: add moving gradient effect")
    return new_prompts


def test_hints_do_not_pile_up(make_trainer):
    """As long as they did, prompts outgrew the policy's positions."""
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.append(prompts[0])
        return [float(len(ids) - 3) for ids in completion_ids]

    make_trainer(reward, max_steps=8, dynamic_prompts_fn=curriculum_fn).train()
    originals, rewritten = seen[::2], seen[1::2]
    assert len(set(originals)) == 4
    for original, prompt in zip(originals, rewritten, strict=True):
        assert prompt in (f"{original} // Hint: check your color setup in GLSL",
                          f"{original} // Next: add moving gradient effect")  # fmt: skip


@pytest.mark.slow
def test_a_long_run_with_prompts_that_are_too_long(make_trainer, monkeypatch):
    """Hints make prompts longer than max_prompt_length: their ends are kept."""
    trainer = make_trainer(
        lambda completion_ids, **kwargs: [float(len(ids) - 3) for ids in completion_ids],
        max_steps=300,
        max_prompt_length=12,
        dynamic_prompts_fn=curriculum_fn,
        logging_steps=300,
    )
    seen, generate = [], trainer.rollouts.engine.generate

    def watched(prompt_ids, *given, **more):
        seen.append(prompt_ids[0])
        return generate(prompt_ids, *given, **more)

    monkeypatch.setattr(trainer.rollouts.engine, "generate", watched)
    trainer.train()
    assert trainer.state.global_step == len(seen) == 300
    assert max(len(ids) for ids in seen[::2]) == 4 and {len(ids) for ids in seen[1::2]} == {12}
    ends = set(trainer.processing_class.batch_decode(seen[1::2]))
    hints = ("// Hint: check your color setup in GLSL", "// Next: add moving gradient effect")
    tokenizer = trainer.processing_class
    assert ends <= {tokenizer.decode(tokenizer(hint)["input_ids"][-12:]) for hint in hints}


def test_prompts_are_replaced_with_their_columns(train):
    seen, _ = train(harder, **GROUPS)
    assert seen == [
        [("000=", "000"), ("037=", "730")],
        [("9000=", "000"), ("074=", "470")],
        [("99000=", "000"), ("111=", "111")],
        [("999000=", "000"), ("148=", "841")],
    ]


def test_what_a_function_of_groups_is_given(train):
    calls = []

    def record(prompts, completions, rewards, metas):
        calls.append(copy.deepcopy((prompts, completions, rewards, metas)))
        metas[0]["answer"] = prompts[0] = "changed"  # a copy
        return [None, None]

    seen, _ = train(record, max_steps=2, **GROUPS)
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
    train(record, max_steps=4, per_device_eval_batch_size=4, **changes, **GROUPS)
    assert calls == [["000=", "037="]] * 2


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 3, "max_steps": 7}])
@pytest.mark.parametrize(("function", "form"), [(harder, "groups"), (hint, "samples")])
def test_resumed_run_is_the_straight_run(train, function, form, changes, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"} | changes
    changes["dynamic_prompts_form"] = form
    _, straight = train(function, **changes)
    _, resumed = train(function, resume=str(tmp_path / "out" / "checkpoint-2"), **changes)
    assert logged(resumed) == logged(straight)
    assert torch.equal(parameters(resumed.model), parameters(straight.model))
    other = {"groups": "samples", "samples": "groups"}[form]
    for message, function_, form_ in (
        ("dynamic_prompts_fn = '.*', got None", None, "samples"),
        (f"dynamic_prompts_form = '{form}', got '{other}'", function, other),
    ):
        changes["dynamic_prompts_form"] = form_
        with pytest.raises(ValueError, match=message):
            train(function_, resume=str(tmp_path / "out" / "checkpoint-2"), **changes)


def test_dynamic_sampling_draws_from_the_dataset(make_trainer):
    asked, given = [], []

    def reward(prompts, **kwargs):
        asked.append(prompts[::4])
        odd = [int(prompt[:-1]) % 2 for prompt in prompts]
        return [float(row * useful) for row, useful in enumerate(odd)]

    def stay(prompts, completions, rewards, metas):
        given.append(prompts)
        return prompts

    changes = {"dynamic_sampling": True, "max_steps": 2} | TWO_PROMPTS | GROUPS
    canned(make_trainer(reward, dynamic_prompts_fn=stay, **changes)).train()
    assert given[0] == ["037=", "111="]  # those that are trained on
    assert asked == [["000=", "037="], ["074="], ["111="], ["037=", "111="]]


def test_messages_stay_messages(make_trainer, chat_dataset):
    seen = []

    def reward(prompts, **kwargs):
        seen.append(prompts[0][0]["content"])
        return [0.0] * len(prompts)

    def longer(prompts, completions, rewards, metas):
        return [[{"role": "user", "content": f"1{prompt[0]['content']}"}] for prompt in prompts]

    changes = {"max_steps": 2, "shuffle_dataset": False, "train_dataset": chat_dataset} | GROUPS
    make_trainer(reward, dynamic_prompts_fn=longer, **changes).train()
    assert seen == ["000", "1000"]


def ask(function, prompt="12=", form="groups", **columns):
    rows = [{"prompt": prompt} | columns, {"prompt": prompt} | columns]
    curriculum = Curriculum(PromptStream(Dataset.from_list([{"prompt": "1="}])), function,
                            Accelerator(cpu=True), form)  # fmt: skip
    rollouts = [Rollout(prompt, [3], "4", [4], False, row=row) for row in rows]
    curriculum.rewrite(rollouts, torch.tensor([torch.nan, 1.0]), 1)
    return curriculum


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["1="], "expected a list of 2 prompts, one per prompt that it was given, got 1"),
        (["1="] * 3, "got 3"),
        ("12", "got str"),
        (None, "got NoneType"),
        ([3, "1="], "expected text or None, as the prompt is that it replaces, got 3"),
        ([[{"role": "user", "content": "1"}]] * 2, "expected text or None"),
    ],
)
@pytest.mark.parametrize("form", ["groups", "samples"])
def test_wrong_answers(answer, message, form):
    with pytest.raises(ValueError, match=f"dynamic_prompts_fn: .*{message}"):
        ask(lambda *given: answer, form=form)


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
    assert train(path, max_steps=2, **GROUPS)[0] == train(harder, max_steps=2, **GROUPS)[0]
    assert make_args(dynamic_prompts_fn=harder).to_dict()["dynamic_prompts_fn"] == path
    assert path in make_args(dynamic_prompts_fn=harder).to_json_string()
    local = make_args(dynamic_prompts_fn=lambda *given: given)  # which has no pickle
    assert "lambda" in pickle.loads(pickle.dumps(local)).dynamic_prompts_fn
    for wrong, message in (
        (3, "expected a function or its import path, got 3"),
        ("nowhere.at.all", "module 'nowhere.at' cannot be imported"),
        ("test_curriculum.nothing", "module 'test_curriculum' has no 'nothing'"),
        ("harder", "expected package.module.function, got 'harder'"),
    ):
        with pytest.raises(ValueError, match=f"dynamic_prompts_fn: {message}"):
            train(wrong)
    with pytest.raises(ValueError, match="dynamic_prompts_form: expected one of samples, groups"):
        make_args(dynamic_prompts_fn=harder, dynamic_prompts_form="prompts")
    with pytest.raises(ValueError, match="dynamic_prompts_form: expected only with dynamic_prompt"):
        make_args(**GROUPS)
    with pytest.raises(ValueError, match="dynamic_prompts_fn: .* with overlap_generation"):
        GRPOConfig(use_cpu=True, dynamic_prompts_fn=harder, overlap_generation=True)
