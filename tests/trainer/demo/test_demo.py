from __future__ import annotations

import json
import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.demo.__main__ import CONFIG, main
from grpo_trainer.demo.policy import CHARACTERS
from grpo_trainer.demo.task import digits_reversal_reward, write_dataset


def test_dataset(tmp_path):
    parts = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in write_dataset(tmp_path, seed=0)
    ]
    train, held_out = ({row["prompt"] for row in part} for part in parts)
    assert len(train) + len(held_out) == 1000 and not train & held_out
    assert all(row["prompt"] == row["answer"][::-1] + "=" for part in parts for row in part)
    rewards = digits_reversal_reward(["321", "421", "32", "", "3217"], ["321"] * 5)
    assert rewards == pytest.approx([1.0, 0.8, 0.4, 0.0, 0.6])


def test_short_run_leaves_its_files(tmp_path, monkeypatch, capsys):
    small = tmp_path / "small.yaml"
    small.write_text(CONFIG.read_text().replace("512  # 32 prompts", "64"))
    monkeypatch.setattr("grpo_trainer.demo.__main__.CONFIG", small)
    main(["--out", str(tmp_path), "--steps", "2"])
    said, complained = capsys.readouterr()
    assert re.match(r"A 7\d,\d+-parameter transformer learns to write 3 digits backwards", said)
    assert "Loading weights" not in complained and "Generating train split" not in complained
    reward = re.search(r"^Mean reward on held-out prompts.*: (\S+) before, \S+ after$", said, re.M)
    assert reward is not None and float(reward[1]) <= 0.2
    assert f"report: {tmp_path / 'trained' / 'report.html'}" in said

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer) == len(CHARACTERS) + 2
    assert tokenizer.decode(tokenizer(f"{CHARACTERS}?")["input_ids"]) == f"{CHARACTERS}?"
    # otherwise another token that is left out would pass for the end
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
    assert [i for i, text in enumerate(texts) if not text] == [tokenizer.eos_token_id]
