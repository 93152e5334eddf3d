"""The example with a pretrained model: three steps of it, its files, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
import torch


@pytest.fixture(scope="module")
def quick_run(smollm, model_folder, tmp_path_factory):
    """Run what ``make real QUICK=1`` runs, with this cache; return the folder."""
    folder = tmp_path_factory.mktemp("run")
    smollm.main(["--quick", "--out", str(folder), "--cache", str(model_folder.parent)])
    return folder


def test_three_steps_end_in_a_report(smollm, quick_run):
    history = json.loads((quick_run / "trained" / "run.json").read_text())["history"]
    steps = [row for row in history if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(0 <= row["grad_norm"] < 1e3 and 0 <= row["reward"] <= 1 for row in steps)
    assert any(row["grad_norm"] > 0 for row in steps)  # unless every group has equal rewards
    told = smollm.report(quick_run / "trained")
    for title in ("held-out reward", *smollm.TASKS):
        assert re.search(rf"^ *{title} +\d\.\d{{3}} +\d\.\d{{3}}$", told, re.MULTILINE)
    shown = told.splitlines()[-6:]  # the question, and an answer before and after
    assert told.splitlines()[-7].split() == ["question", "before", "after"]
    assert all(line[:64].strip() and line[64:90].strip() and line[90:] for line in shown)


def test_the_converted_model_has_its_size(model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32
    assert model.config.tie_word_embeddings and model.config.vocab_size == 49_152


def test_the_model_answers(model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


def test_ends_and_digits_are_single_tokens(model_folder):
    """A turn ends in one token, which also fills up, and a number has a token for each digit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12 + 345"}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer.tokenize(text)
    assert tokens.count("<|im_start|>") == 3 and tokens.count("<|im_end|>") == 2
    assert [token.lstrip("Ġ") for token in tokens if token[-1].isdigit()] == list("12345")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_model_is_converted_once(smollm, model_folder, monkeypatch):
    class ConvertedAgainError(Exception):
        pass

    def again(*args, **kwargs):
        raise ConvertedAgainError

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", again)
    gguf, cache = smollm.packaged_gguf(), model_folder.parent
    assert smollm.convert(gguf, cache) == model_folder
    checksum = model_folder / "sha256"
    right = checksum.read_text()
    checksum.write_text("0" * 64)  # as if the weights had changed
    with pytest.raises(ConvertedAgainError):
        smollm.convert(gguf, cache)
    checksum.write_text(right)
    assert smollm.convert(gguf, cache) == model_folder


def test_rows_are_of_both_tasks_and_held_out_ones_are_new(smollm, tmp_path):
    train, held_out = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in smollm.write_rows(tmp_path)
    )
    questions = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, held_out)]
    assert not questions[0] & questions[1] and len(questions[1]) == len(held_out)
    shown = [message["content"] for row in train for message in row["prompt"][:-1]]
    assert not set(shown) & (questions[0] | questions[1])
    for rows in (train, held_out):
        assert {row["task"] for row in rows} == set(smollm.TASKS)
    assert len(train) > 600


def test_right_answers_get_the_whole_reward(smollm, tmp_path):
    rows = [json.loads(line) for line in smollm.write_rows(tmp_path)[1].read_text().splitlines()]
    entries = [row["entry"] for row in rows]
    tasks = [row["task"] for row in rows]
    logged = {}

    def rewards(answers):
        completions = [[{"role": "assistant", "content": text}] for text in answers]
        return smollm.graded(completions, task=tasks, entry=entries, log_metric=logged.__setitem__)

    assert rewards([f" {json.loads(entry)['answer']}\n" for entry in entries]) == [1.0] * len(rows)
    assert logged == {f"tasks/{task}": 1.0 for task in smollm.TASKS}
    assert rewards(["no idea whatsoever"] * len(rows)) < [0.5] * len(rows)


def test_a_file_that_is_no_such_model(smollm, tmp_path, capsys):
    from gguf import GGUFWriter

    strange = tmp_path / "strange.gguf"
    writer = GGUFWriter(strange, "nonsense")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text, cut = tmp_path / "text.gguf", tmp_path / "cut.gguf"
    text.write_text("not a model")
    with smollm.packaged_gguf().open("rb") as file:
        cut.write_bytes(file.read(4 << 20))
    for path, message in (
        (strange, "transformers can read, got strange.gguf: .*nonsense"),
        (tmp_path / "none.gguf", "expected a GGUF file, got .*none.gguf"),
        (text, "transformers can read, got text.gguf: "),
        (cut, "transformers can read, got cut.gguf: "),
    ):
        with pytest.raises(SystemExit):
            smollm.main(["--gguf", str(path), "--out", str(tmp_path), "--cache", str(tmp_path)])
        error = capsys.readouterr().err
        assert re.search(message, error) and error.count("\n") == 1
