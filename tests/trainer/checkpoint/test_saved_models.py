"""A saved model is the old one or the new one, never a mixture, whenever the saving ends."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_trainer.checkpoint import CheckpointError
from grpo_trainer.checkpoint.files import model_aside
from tests.support.trainer import parameters, rows_reward


def files(folder: Path) -> dict[str, str]:
    """Return the contents by name, without what is still aside."""
    return {
        path.name: path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent == folder
    }


def write(folder: Path, names: list[str], content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(content)


ONE = ["model.safetensors"]
TWO = [
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]  # fmt: skip
REST = ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("old", [ONE, TWO])
@pytest.mark.parametrize("new", [ONE, TWO])
def test_no_mixture_is_ever_a_model(tmp_path, monkeypatch, old, new):
    folder = tmp_path / "model"
    write(folder, [*old, *REST], "old")
    write(folder, ["model_card.safetensors", "README.md"], "mine")
    seen = []

    def watched(action):
        def act(path, *args, **kwargs):
            action(path, *args, **kwargs)
            seen.append(files(folder))

        return act

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    with model_aside(folder) as aside:
        assert (aside / "README.md").read_text() == "mine"
        write(aside, [*REST, *new], "new")
        seen.append(files(folder))
    monkeypatch.undo()
    for found in seen:
        model = {name: text for name, text in found.items() if text != "mine"}
        if "config.json" in model:
            assert model in (
                dict.fromkeys((*old, *REST), "old"),
                dict.fromkeys((*new, *REST), "new"),
            )
    names = {*new, *REST, "README.md", "model_card.safetensors"}
    assert {path.name for path in folder.iterdir()} == names


class _Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "raised"),
    [(_Killed(), _Killed), (OSError(errno.ENOSPC, "No space left"), CheckpointError)],
)
def test_a_save_that_does_not_end_leaves_the_old_model(make_trainer, monkeypatch, error, raised):
    def full(*args, **kwargs):
        raise error

    trainer = make_trainer(rows_reward, max_steps=1)
    folder = Path(trainer.args.output_dir)
    trainer.save_model()
    before = parameters(trainer.model)
    trainer.train()
    with monkeypatch.context() as patches:
        patches.setattr(torch, "save", full)  # the last file, when the weights are written
        with pytest.raises(raised):
            trainer.save_model()
    assert torch.equal(parameters(AutoModelForCausalLM.from_pretrained(folder)), before)
    # it would fill the disk
    assert (folder / "incomplete-model").exists() == (raised is _Killed)
    trainer.save_model()
    after = parameters(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(after, parameters(trainer.model)) and not torch.equal(after, before)
    assert not (folder / "incomplete-model").exists()
