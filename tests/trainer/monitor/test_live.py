"""What a run shows while it goes on: a view in a terminal, lines elsewhere, completions."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from grpo_trainer import RichProgressCallback
from grpo_trainer.monitor import show_progress
from grpo_trainer.monitor.completions import completion_table
from tests.support.trainer import rows_reward

NOTHING_LEARNED = "every group had equal rewards, so nothing was learned: see the report"


def terminal(force_terminal: bool = True, **options: Any) -> Console:
    size = {"width": 100, "height": 40}
    file = io.StringIO()
    return Console(file=file, force_terminal=force_terminal, record=True, **size, **options)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_given_back_however_a_run_ends(make_trainer, error):
    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and errors:
            raise errors.pop()
        return [0.0] * len(completions)

    errors = [error()]
    trainer, console = make_trainer(reward), terminal()
    trainer.add_callback(RichProgressCallback(console))
    with pytest.raises(error):
        trainer.train()
    shown = console.file.getvalue()
    hidden, back = (shown.rfind(f"\x1b[?25{code}") for code in "lh")  # the cursor
    assert 0 <= hidden < back
    trainer.evaluate()
    assert "\x1b" not in console.file.getvalue()[len(shown) :]  # the panel is not drawn again


@pytest.mark.parametrize("live", [True, False])
def test_evaluations_each_reward_and_the_end_are_shown(make_trainer, live):
    def short(completions, **kwargs):
        return [0.125] * len(completions)

    def right(completions, **kwargs):
        return [0.5] * len(completions)

    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3, "logging_steps": 2}
    trainer = make_trainer([short, right], beta=0.1, **settings)
    console = terminal(live, color_system=None)
    trainer.add_callback(RichProgressCallback(console))
    trainer.train()
    text = " ".join(console.export_text().split())
    last = [row for row in trainer.state.log_history if "kl" in row][-1]
    assert f"kl {last['kl']:.3g}" in text and "step 3/3" in text
    for step in (2, 3):
        expected = rf"eval step {step} reward 0.625 ± 0 rewards/short 0.125 rewards/right 0.5 "
        assert re.search(expected, text), text
    assert re.search(r"trained 3 steps in 0:00:\d\d mean loss \S+", text)
    assert NOTHING_LEARNED in text
    if not live:
        assert re.findall(r"(?<!eval )step (\d)/3", text) == ["2", "3"]  # what came last, too


def test_a_view_that_fails_does_not_end_the_run(make_trainer, monkeypatch, caplog, capsys):
    console = terminal(False)
    monkeypatch.setattr(console, "print", lambda *_, **__: 1 / 0)
    trainer = make_trainer(rows_reward, disable_tqdm=False)
    trainer.callback_handler.callbacks.insert(0, RichProgressCallback(console))
    trainer.train()
    assert caplog.text.count("the view of the run: the run continues without it: ZeroDivision") == 1
    shown = capsys.readouterr().err  # which is no terminal
    assert re.search(r"step 2/2 +reward .* left", shown) and NOTHING_LEARNED not in shown
    trainer.add_callback(ProgressCallback)
    show_progress(trainer)
    kinds = {type(view) for view in trainer.callback_handler.callbacks}
    assert RichProgressCallback in kinds and not kinds & {ProgressCallback, PrinterCallback}


def test_a_view_among_the_callbacks_is_the_only_one(make_trainer, capsys):
    """TRL's example scripts pass it."""
    trainer = make_trainer(callbacks=[RichProgressCallback()], disable_tqdm=False, max_steps=2)
    trainer.train()
    assert len(re.findall(r"^step \d/2 ", capsys.readouterr().err, re.MULTILINE)) == 2


def test_a_notebook_gets_a_table_of_the_numbers(make_trainer, monkeypatch):
    display = pytest.importorskip("IPython.display")
    from transformers.utils.notebook import NotebookProgressCallback

    class Output:
        def update(self, page):
            shown.append(page.data)

    def show(page, display_id):
        shown.append(page.data)
        return Output()

    def short(completions, **kwargs):
        return [0.5] * len(completions)

    shown = []
    monkeypatch.setattr(display, "display", show)
    rewards = [short, lambda completions, **kwargs: [0.5] * len(completions)]
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer = make_trainer(rewards, max_steps=2, logging_steps=1, **settings)
    trainer.add_callback(NotebookProgressCallback)
    show_progress(trainer)
    trainer.train()
    rows = re.findall(r"<tr.*?</tr>", shown[-1], re.DOTALL)
    head, *cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]
    assert head[:3] == ["step", "eval_reward", "reward"] and "rewards/&lt;lambda&gt;" in head
    assert [row[:3] for row in cells] == [
        ["0", "1"],
        ["1", "No Log", "1 ± 0"],
        ["2", "1", "1 ± 0"],
    ]
    assert "None" not in "".join(shown) and "loss" in head
    shown.clear()
    trainer.evaluate()
    assert shown[-1] == ""  # the bar is taken away


@pytest.mark.parametrize("column", ["prompt", "completion", "a column"])
def test_texts_do_not_command_the_terminal(column):
    console = terminal(color_system=None)
    text = "a\nb\tc\x1b]0;title\x07\x1b[2J\r\x9b8m\x7f\u202e\u2066"
    console.print(completion_table([{column: text}], "completions at step 3"))
    shown = console.file.getvalue()
    assert re.search("[^\n -~\u2500-\u257f]", shown) is None  # but letters and the frame
    assert r"\x1b]0;title\x07\x1b[2J\r\x9b8m\x7f\u202e\u2066" in shown
