from __future__ import annotations

import pytest
from datasets import Dataset

from grpo_trainer.data import decode_completions, encode_prompts
from grpo_trainer.engines import Sampling
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
    with pytest.raises(ValueError, match="prompt: .* embedding for, ids below 14, got 14 from '12"):
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
