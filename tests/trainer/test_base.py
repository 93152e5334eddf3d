"""BaseTrainer is the one class that touches private methods of transformers' Trainer.

What it overrides has the signatures below in this version of transformers. If one changes, this
test fails first: look at what the new version does with it.
"""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from transformers import Trainer

from grpo_trainer import GRPOTrainer
from grpo_trainer.base import BaseTrainer
from tests.support.documents import ROOT
from tests.support.import_graph import modules

# method of Trainer -> its parameters after self
PINNED = {
    "_get_dataloader": "dataset description batch_size sampler_fn is_training dataloader_key",
    "_get_eval_sampler": "eval_dataset",
    "_get_output_dir": "trial",
    "_inner_training_loop": "batch_size args resume_from_checkpoint trial ignore_keys_for_eval",
    "_load_best_model": "",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval "
    "start_time learning_rate",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_prepare_inputs": "inputs",
    "_push_from_checkpoint": "checkpoint_folder",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_set_signature_columns_if_needed": "",
}


def overridden(kind: type) -> set[str]:
    """Return the methods of transformers' Trainer that a class defines."""
    return {
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and hasattr(Trainer, name) and name != "__init__"
    }


def private(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("name", PINNED)
def test_signatures_are_those_of_this_transformers(name: str) -> None:
    parameters = [*inspect.signature(getattr(Trainer, name)).parameters][1:]
    assert parameters == PINNED[name].split()


def test_one_class_overrides_private_methods() -> None:
    assert private(overridden(BaseTrainer)) == set(PINNED)
    between = [kind for kind in GRPOTrainer.__mro__ if kind is not BaseTrainer]
    ours = between[: between.index(Trainer)]
    assert [private(overridden(kind)) for kind in ours] == [set()] * len(ours)


def test_the_core_is_as_long_as_the_guide_says() -> None:
    page = (ROOT / "docs" / "guides" / "inside-the-trainer.md").read_text()
    files = re.findall(r"^\| \[(\S+)\]\(\.\./\.\./grpo_trainer", page, re.MULTILINE)
    lines = sum(len((ROOT / "grpo_trainer" / name).read_text().splitlines()) for name in files)
    [about] = re.findall(r"^About ([\d,]+) lines", page, re.MULTILINE)
    assert len(files) == 9 and lines == pytest.approx(int(about.replace(",", "")), rel=0.05)


def test_no_method_is_overridden_twice() -> None:
    kinds = GRPOTrainer.__mro__[: GRPOTrainer.__mro__.index(Trainer)]
    names = [name for kind in kinds for name in overridden(kind)]
    assert sorted(names) == sorted(set(names))


def test_one_file_inherits_from_transformers_trainer() -> None:
    found = {
        module
        for module, path in modules().items()
        if module.startswith("grpo_trainer.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Trainer" for base in node.bases)
    }
    assert found == {"grpo_trainer.base"}
