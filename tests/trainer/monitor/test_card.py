"""The card of a saved model: the recipe, the papers, and respect for what somebody wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, RepoUrl

from grpo_trainer import GRPOTrainer, Term
from grpo_trainer.monitor import CARD_NAME
from tests.support.trainer import adapted


def saved(trainer: GRPOTrainer) -> str:
    trainer.save_model()
    return (Path(trainer.args.output_dir) / CARD_NAME).read_text()


def test_card_has_the_recipe(make_trainer):
    trainer = make_trainer(loss_type="dr_grpo", beta=0.04, epsilon_high=0.3, max_steps=1)
    trainer.train()
    text = saved(trainer)
    assert {"grpo", "dr_grpo"} <= set(ModelCard(text).data.tags)
    for words in (
        "`dr_grpo` (Dr. GRPO, arXiv:2503.20783)", "beta = 0.04", "epsilon_high = 0.3",
        "`digits_reversal_reward`", "25 prompts", "4 per prompt", "| torch |",
    ):  # fmt: skip
        assert words in text, words
    trainer.create_model_card(model_name="mine", dataset_name="owner/prompts", tags="math")
    data = ModelCard.load(Path(trainer.args.output_dir) / CARD_NAME).data
    assert data.model_name == "mine" and data.datasets == ["owner/prompts"]
    assert {"math", "grpo"} <= set(data.tags)
    with pytest.raises(TypeError, match="language"):
        trainer.create_model_card(language="en")


def test_card_names_what_the_user_plugged_in(make_trainer):
    text = saved(make_trainer(columns=[column], terms=[Nothing()]))
    assert f"| columns | `{__name__}.column` |" in text
    assert f"| terms of the loss | `{__name__}.Nothing` |" in text and "prompts by" not in text


def column(batch, policy):
    return None


class Nothing(Term):
    def on_head(self, batch, policy):
        return None


def test_an_upload_by_push_to_hub(make_trainer, monkeypatch):
    uploaded = []

    def upload(api, repo_id, folder_path, **kwargs):
        uploaded.append((repo_id, ModelCard.load(Path(folder_path) / CARD_NAME).data))

    made = RepoUrl("https://huggingface.co/me/mine")
    monkeypatch.setattr(HfApi, "create_repo", lambda api, name, **kwargs: made)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    make_trainer(hub_model_id="me/mine").push_to_hub(dataset_name="owner/prompts", tags="math")
    [(repository, card)] = uploaded
    assert (repository, card.model_name, card.datasets) == ("me/mine", "mine", ["owner/prompts"])
    assert {"math", "grpo"} <= set(card.tags)


def test_an_edited_card_stays(make_trainer, caplog):
    trainer = make_trainer(max_steps=1, save_strategy="steps", save_steps=1)
    path = Path(trainer.args.output_dir) / CARD_NAME
    card = ModelCard(saved(trainer))
    card.data.tags.append("mine")  # uploads and other libraries add tags
    card.save(path)
    trainer.train()
    assert (path.parent / "checkpoint-1" / CARD_NAME).exists()
    assert "| 1, learning rate" in saved(trainer)  # written again, with the steps
    for mine in (path.read_text().replace("## Recipe", "## My recipe"), "# Mine\n"):
        path.write_text(mine)
        caplog.clear()
        assert saved(trainer) == mine
        assert "was edited: leaving it unchanged" in caplog.text


def test_card_of_an_adapter(make_trainer, policy, caplog):
    trainer = make_trainer(model=adapted(policy, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    text = saved(trainer)
    assert "this is a LORA adapter" in text and ModelCard(text).data.library_name == "peft"
    assert saved(trainer) == text  # peft added lines of its own in between
    folder = Path(trainer.args.output_dir) / CARD_NAME
    folder.unlink()
    folder.mkdir()
    trainer.save_model()
    assert folder.is_dir() and "README.md is not a file: leaving it unchanged" in caplog.text


def test_a_card_that_fails_does_not_cost_the_model(make_trainer, monkeypatch, caplog):
    trainer = make_trainer()
    folder = Path(trainer.args.output_dir)
    folder.mkdir(exist_ok=True)
    (folder / CARD_NAME).write_bytes(b"\xff\xfe no text")
    trainer.save_model()
    assert (folder / CARD_NAME).read_bytes() == b"\xff\xfe no text"  # somebody's own
    (folder / CARD_NAME).unlink()
    monkeypatch.setattr("grpo_trainer.monitor.run_file.environment", lambda device: 1 / 0)
    trainer.save_model()
    assert (folder / "model.safetensors").exists() and not (folder / CARD_NAME).exists()
    assert f"card of {folder}: the run continues without it: ZeroDivisionError" in caplog.text
