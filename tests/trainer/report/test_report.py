"""The report: what it finds in a log, and the page as a browser shows it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from transformers import TrainerCallback

from grpo_trainer import cli
from grpo_trainer.monitor import RunRecord, load_run
from grpo_trainer.report import page
from grpo_trainer.report.page import render
from tests.support.browser import open_page

pytest.importorskip("plotly")

STEPS = range(5, 105, 5)
SICK = "</script><img src=http://example.com/x.png>"  # what a page must not take for its own


# of a run in good health: metric -> step -> value
CURVES: dict[str, Callable[[int], float]] = {
    "reward": lambda step: step / 100,
    "reward_std": lambda step: 0.2,
    "rewards/right/mean": lambda step: step / 100,
    "rewards/short/mean": lambda step: 1 - step / 100,
    "frac_reward_zero_std": lambda step: 0.1,
    "entropy": lambda step: 1.0 - step / 300,
    "kl": lambda step: step / 1000,
    "grad_norm": lambda step: 1.0,
    "clip_ratio/region_mean": lambda step: 0.01,
    "completions/mean_length": lambda step: 40 + step,
    "completions/clipped_ratio": lambda step: 0.05,
    "sampling/mismatch_kl_k3": lambda step: 1e-5,
    "profiling/generate": lambda step: 2.0,
    "profiling/loss": lambda step: 1.0,
    "step_time": lambda step: 3.0,
    "frac_rows_skipped": lambda step: 0.5 + step / 1000,
    "perplexity": lambda step: 3 - step / 100,
    "num_tokens": lambda step: 3000 * step,
    "my/metric": lambda step: step % 3,
}


def history(**changes) -> list[dict]:
    """Return a run in good health, but for what ``changes`` say: step -> value."""
    curves = CURVES | changes
    rows = [{"step": step} | {name: at(step) for name, at in curves.items()} for step in STEPS]
    held_out = [{"step": step, "eval_reward": step / 120, "eval_loss": 0.0} for step in (50, 100)]
    summary = {"step": 100, "train_runtime": 60.0, "train_loss": 0.1, "total_flos": 1.0}
    return [*rows[:-1], *held_out, rows[-1] | summary]  # the last ones have no row of their own


def run(folder: Path, name: str = "run", **changes) -> RunRecord:
    """Return a run on disk, with completions of two prompts."""
    for step in STEPS:
        prompts = ["1 + 1 =", SICK] * 4
        columns = {
            "prompt": prompts,
            "completion": [f"answer {i} at {step} {SICK}" for i in range(8)],
            "reward": [min(1.0, step / 100 + i / 20) for i in range(7)] + [float("nan")],
            "step": [step] * 8,
        }
        path = folder / "completions" / f"completions_{step:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), path)
    record = RunRecord(
        name=name,
        history=history(**changes),
        settings={"learning_rate": 1e-6, "beta": 0.1, "output_dir": str(folder)},
        changed=["beta"],
        recipe={"model": "path/to/model", "rewards": {"right": 1.0}},
        environment={"torch": "2", "device": "a CPU"},
        folder=folder,
    )
    record.save()
    return record


def visible(html: str) -> str:
    """Return the text of a page, without its code."""
    body = html.partition("<body>")[2]
    text = re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", " ", body))
    return " ".join(text.split())


@pytest.fixture(scope="module")
def sick_run(tmp_path_factory) -> RunRecord:
    return run(tmp_path_factory.mktemp("run"), entropy=lambda step: 1.0 if step < 50 else 0.01)


BLUE = [0x6E, 0xA8, 0xFE]  # --c0 of page.css in the dark


@pytest.mark.slow
def test_a_page_as_a_browser_shows_it(sick_run, tmp_path):
    """In the dark, on a narrow screen."""
    *rows, last = sick_run.history
    record = replace(sick_run, history=[*rows, last | {"my/once": 3e-4}])
    path = tmp_path / "report.html"
    path.write_text(render([record]))
    page = open_page(path, tmp_path, dark=True, size=(500, 1000))
    assert page.console == [] and 'data-drawn="yes"' in page.dom
    assert page.pixels.mean() < 0.3 and page.pixels.std() > 0.02
    off = abs(page.pixels * 255 - BLUE).max(axis=2)
    assert (off < 40).sum() > 100  # the first curve
    moving = {name for name, at in CURVES.items() if at(5) != at(10)} - {"num_tokens"}
    drawn = re.findall(r'<path class="js-line"[^>]* d="M[^"]{8,}', page.dom)
    assert len(drawn) >= len(moving)
    text = visible(page.dom)
    for words in ("Worth a look", "Entropy has collapsed", "Reward by function", "my/metric",
                  "Seconds per step", "answer 6 at 5", "answer 6 at 100", "1 + 1 =", "beta",
                  "path/to/model", "a CPU", "Clipped tokens: all 0.01", "that need no backward",
                  "Of the policy on its own completions"):  # fmt: skip
        assert words in text, words
    assert "example.com" in text and "<img src=http" not in page.dom
    # an axis with one value is around it
    [card] = re.findall(r"(?s)<h3>my/once</h3>.*?</figure>", page.dom)
    ticks = re.findall(r'class="ytick"><text[^>]*>(?:<tspan>)?([^<]+)', card)
    assert ticks and not any(tick.startswith("\u2212") for tick in ticks), ticks


def test_names_and_values_are_no_markup(tmp_path):
    facts = {SICK: SICK}
    record = replace(run(tmp_path, f"run {SICK}", **{SICK: lambda step: 1.0}), settings=facts)
    record = replace(record, changed=[SICK], recipe=facts, environment=facts)
    other = replace(record, name=f"other {SICK}", settings={SICK: "b"}, recipe={SICK: "b"})
    for runs in ([record], [record, other]):
        page = render(runs)
        assert page.count("example.com") > 5 and "<img" not in page


def test_a_page_of_two_runs(sick_run, tmp_path, capsys):
    other = replace(sick_run, name="other", history=history(), folder=tmp_path / "other")
    other = replace(other, settings=sick_run.settings | {"beta": 0.5})
    other.save()
    path = tmp_path / "two.html"
    cli.main(["report", str(sick_run.folder), str(other.folder), "--out", str(path)])
    assert capsys.readouterr().out.strip() == str(path)
    text = visible(path.read_text())
    assert text.count("Worth a look") == 1
    assert "Settings that differ run other beta 0.1 0.5" in text
    # runs of one name are called by their folders
    namesake = shutil.copytree(other.folder, tmp_path / "again" / "other")
    cli.main(["report", str(other.folder), str(namesake), "--out", str(path)])
    assert all(str(folder) in path.read_text() for folder in (other.folder, namesake))


LEARNED = {
    "reward": lambda step: min(step / 50, 1.0),
    "entropy": lambda step: 2.0 / step,
    "frac_reward_zero_std": lambda step: min(step / 80, 1.0),
}


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, None),
        ({"entropy": lambda step: 2.0 / step}, "Entropy has collapsed"),
        ({"clip_ratio/region_mean": lambda step: 0.4}, "Many tokens are clipped"),
        ({"frac_reward_zero_std": lambda step: step / 100}, "Most advantages are zero"),
        ({"completions/clipped_ratio": lambda step: 0.6}, "Many completions are cut off"),
        ({"sampling/mismatch_kl_k3": lambda step: 1e-4 * step}, "Engine and policy drift apart"),
        ({"grad_norm": lambda step: float("nan") if step == 40 else 1.0}, "no longer finite"),
        (LEARNED, "Entropy has collapsed"),  # nobody knows that no more can be had
    ],
)
def test_signs_of_ill_health(changes, title):
    page = render([RunRecord(name="r", history=history(**changes))])
    assert ("Worth a look" in page) == (title is not None) and (title or "") in page
    early = history(**changes)[:3]  # too short for a trend
    assert "Worth a look" not in render([RunRecord(name="r", history=early)])


EQUAL = {"frac_reward_zero_std": lambda step: 1.0}
NEVER = {"reward": lambda step: 0.0, "reward_std": lambda step: 0.0}
RIGHT = NEVER | {"reward": lambda step: 1.0}
MIXED = {"reward": lambda step: 0.5 + step / 1000, "reward_std": lambda step: 0.4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (NEVER, "Every completion got the reward 0, so nothing was learned"),
        (RIGHT, "Every completion got the reward 1, so nothing was learned"),
        (MIXED, "In each group, all completions got the same reward, so nothing was learned"),
        ({"teacher_kl": lambda step: 0.1}, None),  # it learns from another
    ],
)
def test_a_run_whose_groups_all_have_equal_rewards(tmp_path, changes, said):
    """Also a short one, with and without the completions, whose best reward is what all got."""
    whole = run(tmp_path, **EQUAL | changes)
    for count, folder in product((1, 3, 100), (tmp_path, tmp_path / "none")):
        shown = render([replace(whole, history=whole.history[:count], folder=folder)])
        assert ("Every group had equal rewards" in shown) == (said is not None)
        assert said is None or (said in shown and "Most advantages are zero" not in shown)
        assert "Constant: Reward" not in shown and "<h3>Reward</h3>" in shown


def test_the_best_reward_of_completions_tells_learned_from_stuck(tmp_path):
    """What was best at first is no rise: the others did worse."""
    assert "Worth a look" not in render([run(tmp_path, **LEARNED)])
    curves = {"reward": lambda step: 1.0, "frac_reward_zero_std": lambda step: 0.9}
    assert "Most advantages are zero" in render([run(tmp_path, **curves)])


def test_wrong_input(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path)])
    assert "expected the folder of a run, with run.json" in capsys.readouterr().err
    for content in ("{", "[]", '{"unknown": 1}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ValueError, match=r"run\.json is not the record of a run"):
            load_run(tmp_path)
    with pytest.raises(ValueError, match="has logged something, got 'r'"):
        render([RunRecord(name="r", history=[])])


def test_a_run_leaves_its_report(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(write_report=True, log_completions=True, num_completions_to_print=0)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    record = load_run(folder)
    assert record.settings["num_generations"] == 4 and "num_generations" in record.changed
    assert "gradient_accumulation_steps" not in record.changed
    checkpointing = {name for name in record.changed if "checkpointing" in name}
    assert checkpointing == {"gradient_checkpointing"}  # off, and under one of its names
    assert record.recipe["rewards"] == {"digits_reversal_reward": 1.0}
    assert record.environment["torch"] and record.recipe["loss_type"] == "dapo"
    assert any("reward" in row for row in record.history)
    assert "Settings that differ" in (folder / "report.html").read_text()

    for name in ("report.html", "run.json"):
        (folder / name).unlink()
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page.packed_plotly.cache_clear()
    said: list[str] = []
    names: set[str] = set()
    trainer.add_callback(TrainerCallback())
    first_step = trainer.callback_handler.callbacks[-1]
    first_step.on_step_begin = lambda *_, **__: said.append(caplog.text)
    first_step.on_step_end = lambda *_, **__: names.update(os.listdir(folder))
    trainer.train()
    needed = "pip install 'plotly>=6', then"
    assert needed in said[0]  # before anything is generated
    assert "run.json" in names
    assert caplog.text.count(needed) == 1
    assert not (folder / "report.html").exists()


def test_a_report_is_without_the_files_that_are_damaged(make_trainer, caplog):
    settings = {"write_report": True, "log_completions": True, "num_completions_to_print": 0}
    trainer = make_trainer(save_strategy="steps", save_steps=1, **settings)
    folder = Path(trainer.args.output_dir)
    other = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"other": [1]}), other)
    contents = (b"", b"PAR1 half a file", other.getvalue().to_pybytes())
    damaged = [folder / "completions" / f"completions_0000{i}.parquet" for i in (0, 7, 8)]

    def damage(*_, **__):
        damaged[0].parent.mkdir(parents=True)
        for path, content in zip(damaged, contents, strict=True):
            path.write_bytes(content)

    trainer.add_callback(TrainerCallback())
    trainer.callback_handler.callbacks[-1].on_train_begin = damage
    trainer.train()
    for path in damaged:
        [warning] = [line for line in caplog.messages if path.name in line]
        assert "cannot be read" in warning
    assert "<html" in (folder / "report.html").read_text()
