from __future__ import annotations

import csv
import json
import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.demo import compare
from grpo_trainer.demo.__main__ import CONFIG, _compared, main
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


@pytest.mark.parametrize("plots", [True, False])
def test_short_run_leaves_its_files(plots, tmp_path, monkeypatch, capsys):
    if not plots:
        monkeypatch.setattr("grpo_trainer.demo.__main__.find_spec", lambda name: None)
    monkeypatch.setattr(compare, "TOKENS", 16)
    monkeypatch.setattr(compare, "VOCABULARY", 500)
    monkeypatch.setattr(compare, "peak_bytes", lambda names: dict.fromkeys(names, 2 << 20))
    small = tmp_path / "small.yaml"
    small.write_text(CONFIG.read_text().replace("512  # 32 prompts", "64"))
    monkeypatch.setattr("grpo_trainer.demo.__main__.CONFIG", small)
    main(["--out", str(tmp_path), "--steps", "2"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == [
        "reward_first", "reward_last", "eval_reward_first", "eval_reward_last", "prompt",
        "completion_first", "completion_last", "loss_max_abs_diff", "grad_max_rel_diff", "heads",
        "seconds",
    ]  # fmt: skip
    assert summary["eval_reward_first"] <= 0.2
    assert 0 < summary["loss_max_abs_diff"] < 1e-5
    assert 0 < summary["grad_max_rel_diff"] < 1e-4
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["2"]
    said, complained = capsys.readouterr()
    curves = tmp_path / "curves.png"
    assert curves.exists() == plots == ("csv, curves.png: " in said)
    assert not plots or curves.stat().st_size > 1000
    assert ("matplotlib is not installed" in said) != plots
    assert re.match(r"A 7\d,\d+-parameter transformer learns to write 3 digits backwards", said)
    assert "Loading weights" not in complained and "Generating train split" not in complained
    assert (
        "mean reward, held-out prompts" in said and f"a completion of {summary['prompt']}" in said
    )
    assert [row["name"] for row in summary["heads"]] == compare.installed_heads()
    assert re.search(r"^grpo-kernels +\d+ ms +2 MiB +\S+$", said, re.M)
    assert re.search(r"^full logits: \S+ times the time, 1.0 times the memory, ", said, re.M)
    assert said.rstrip().endswith(str(tmp_path / "trained" / "report.html"))

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer) == len(CHARACTERS) + 2
    assert tokenizer.decode(tokenizer(f"{CHARACTERS}?")["input_ids"]) == f"{CHARACTERS}?"
    # otherwise another token that is left out would pass for the end
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
    assert [i for i, text in enumerate(texts) if not text] == [tokenizer.eos_token_id]


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own():
    peaks = compare.peak_bytes(["grpo-kernels", "full logits"])
    assert 0 < peaks["grpo-kernels"] < peaks["full logits"]


def test_the_demo_says_where_others_are_better():
    quantities = {"seconds": 2.0, "peak_bytes": 4 << 20, "error": 1e-3}
    heads = [{"name": "grpo-kernels", **quantities}, {"name": "trl", **quantities, "seconds": 1.0}]
    *_, compared, better = _compared(heads)
    assert compared.startswith("trl: 0.5 times the time, 1.0 times the memory, ")
    assert better == "Better than grpo-kernels here: trl in time."


def test_a_wrong_head_is_not_compared(monkeypatch):
    monkeypatch.setattr(compare, "TOKENS", 16)
    monkeypatch.setattr(compare, "VOCABULARY", 500)
    wrong = {"full logits": lambda *given: 1.5 * compare.HEADS["grpo-kernels"](*given)}
    monkeypatch.setattr(compare, "HEADS", compare.HEADS | wrong)
    with pytest.raises(RuntimeError, match="full logits: loss or gradients differ from fp64"):
        compare.compare()
