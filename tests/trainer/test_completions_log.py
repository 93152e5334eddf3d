"""The table of completions: what reward functions add, and one row per prompt on request."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset


@pytest.mark.parametrize("unique", [False, True])
def test_extra_columns_and_unique_prompts(make_trainer, unique):
    def digits(prompts, completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(len(text) for text in completions))
        return [float(len(text)) for text in completions]

    trainer = make_trainer(
        digits,
        log_completions=True,
        log_unique_prompts=unique,
        max_steps=1,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    table = Dataset.from_parquet(
        str(next(Path(trainer.args.output_dir).glob("completions/*.parquet")))
    )
    prompts = table["prompt"]
    assert len(table) == (2 if unique else 8) and len(set(prompts)) == 2
    assert table["length"] == table["reward"]
    assert trainer.state.log_history[0]["longest"] >= max(table["length"])
