"""Rows whose images cannot be read: other rows take their place, the same on every process."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig
from grpo_trainer.experience import DatasetPrompts
from tests.support.vision import picture
from tests.trainer.data.test_images import ASKED, png
from tests.trainer.test_vision import dataset, make


class Processes:
    """Two processes, as threads that add what they have."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2, timeout=60)
        self._given: dict[int, torch.Tensor] = {}

    def accelerator(self, index: int) -> Any:
        def reduce(value: torch.Tensor) -> torch.Tensor:
            self._given[index] = value
            self._both.wait()
            total = self._given[0] + self._given[1]
            self._both.wait()
            return total

        return SimpleNamespace(
            process_index=index, num_processes=2, device=torch.device("cpu"), reduce=reduce
        )


def rows_with(bad: set[int], count: int = 16) -> Dataset:
    images = [b"bad" if i in bad else png(picture(i)) for i in range(count)]
    column = [{"bytes": image, "path": None} for image in images]
    return Dataset.from_dict({"prompt": [ASKED] * count, "image": column})


def config(**changes: Any) -> GRPOConfig:
    settings = dict(per_device_train_batch_size=8, num_generations=2, use_cpu=True, bf16=False)
    settings["shuffle_dataset"] = False
    return GRPOConfig(**(settings | {"report_to": "none", "on_bad_image": "skip"} | changes))


def test_processes_take_the_same_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Row 1 is read by the first of them, rows 3 and 4 by the second."""
    processes, drawn, states = Processes(), {}, {}
    dataset = rows_with({1, 3, 4})

    def run(index: int) -> None:
        prompts = DatasetPrompts(dataset, config(), processes.accelerator(index))
        drawn[index] = [sample.row.number for sample in prompts.next(4)]
        states[index] = prompts.state()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    # 4 and 5 take the places of 1 and 3; where 4 went it is read, or not
    # each has two of the rows, and each row is completed twice
    assert sorted(drawn[0] + drawn[1]) == [0, 0, 2, 2, 5, 5, 6, 6] and states[0] == states[1]
    assert len(drawn[0]) == len(drawn[1]) == 4 and states[0]["offset"] == 7
    assert all(f"of row {number}," in caplog.text for number in (1, 3, 4))


def test_an_evaluation_names_the_row(tmp_path: Path) -> None:
    rows = Dataset.from_dict(
        dataset().to_dict() | {"image": [{"bytes": b"bad", "path": None}] * 8},
        features=dataset().features,
    )
    trainer = make("llava", tmp_path, eval_dataset=rows, settings={"on_bad_image": "skip"})
    with pytest.raises(ValueError, match="cannot be read in 'image' of row 0, "):
        trainer.evaluate()


def test_nothing_can_be_read() -> None:
    one = SimpleNamespace(
        process_index=0, num_processes=1, device=torch.device("cpu"), reduce=lambda value: value
    )
    with pytest.raises(ValueError, match="readable images in one of 10 rows, got none"):
        DatasetPrompts(rows_with(set(range(16))), config(), one).next(2)
