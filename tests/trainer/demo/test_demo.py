from __future__ import annotations

import csv
import json
import re
from dataclasses import fields

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.demo import compare
from grpo_trainer.demo.__main__ import main
from grpo_trainer.demo.policy import CHARACTERS, write_policy
from grpo_trainer.demo.report import Summary
from grpo_trainer.demo.task import digits_reversal_reward, write_dataset


@pytest.mark.parametrize(
    ("text", "reward"), [("321", 1.0), ("421", 0.8), ("32", 0.4), ("", 0.0), ("3217", 0.6)]
)
def test_reward(text, reward):
    assert digits_reversal_reward([text], ["321"]) == [pytest.approx(reward)]


def test_dataset(tmp_path):
    parts = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in write_dataset(tmp_path, seed=0)
    ]
    train, held_out = ({row["prompt"] for row in part} for part in parts)
    assert len(train) + len(held_out) == 1000 and not train & held_out
    assert all(row["prompt"] == row["answer"][::-1] + "=" for part in parts for row in part)


def test_policy_folder(tmp_path):
    write_policy(tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(CHARACTERS) and tokenizer.convert_tokens_to_ids("?") not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == CHARACTERS
    assert model.config.vocab_size == len(tokenizer) == len(CHARACTERS) + 2
    # otherwise another token that is left out would pass for the end
    shown = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
    assert [i for i, text in enumerate(shown) if not text] == [tokenizer.eos_token_id]


def test_short_run_leaves_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "TOKENS", 16)
    monkeypatch.setattr(compare, "VOCABULARY", 500)
    monkeypatch.setattr(compare, "peak_bytes", lambda names: dict.fromkeys(names, 2 << 20))
    monkeypatch.setattr("grpo_trainer.demo.__main__.PROMPTS_PER_STEP", 4)
    main(["--out", str(tmp_path), "--steps", "2"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == [field.name for field in fields(Summary)]
    assert summary["eval_reward_first"] <= 0.2
    assert 0 < summary["loss_max_abs_diff"] < 1e-5
    assert 0 < summary["grad_max_rel_diff"] < 1e-4
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["2"]
    assert (tmp_path / "curves.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert (
        "mean reward, held-out prompts" in said and f"a completion of {summary['prompt']}" in said
    )
    assert re.search(r"^grpo-kernels +\d+ ms +2 MiB +\S+$", said, re.M)
    assert [row["name"] for row in summary["heads"]] == compare.installed_heads()
    assert said.rstrip().endswith(str(tmp_path / "trained" / "report.html"))


def test_a_wrong_head_is_not_compared(monkeypatch):
    monkeypatch.setattr(compare, "TOKENS", 16)
    monkeypatch.setattr(compare, "VOCABULARY", 500)
    wrong = {"full logits": lambda *given: 1.01 * compare.HEADS["grpo-kernels"](*given)}
    monkeypatch.setattr(compare, "HEADS", compare.HEADS | wrong)
    with pytest.raises(RuntimeError, match="full logits: loss or gradients differ from fp64"):
        compare.compare()


def test_memory_is_measured_in_processes_of_their_own():
    peaks = compare.peak_bytes(["grpo-kernels", "full logits"])
    assert 0 < peaks["grpo-kernels"] < peaks["full logits"]
