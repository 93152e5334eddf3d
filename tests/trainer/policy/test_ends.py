"""New tokens, and heads tied to the embeddings, under adapters: from the start to a resumed run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_kernels.hf import runs_in_fp32
from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import make_policy
from grpo_trainer.policy import load_policy, ties_ends
from tests.support import vision
from tests.support.tiny_models import tiny_model
from tests.support.trainer import CannedEngine, adapted, lengths_reward, rows_reward

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, on tied weights and switched adapters

LORA = dict(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
NEW = ["<plan>", "</plan>"]
ROWS = [{"prompt": f"<plan>{n}</plan>="} for n in range(8)]


def tied_policy(tokenizer, tied: bool = True) -> PreTrainedModel:
    model = make_policy(tokenizer, seed=0)
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    return model


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, tokenizer, tmp_path) -> Path:
    """Return the folder of a model without the new tokens."""
    tied_policy(tokenizer, request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def resized(folder: Path, rows: int) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows)
    return model


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(model.config.vocab_size)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.log_softmax(-1)


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_of_the_whole_model_says_whether_ends_are_tied(tied):
    """The config of its text part may have no field for it."""
    model = vision.tiny_model("qwen2_5_vl", tie_word_embeddings=tied)
    one = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert ties_ends(model) == one == tied


@pytest.mark.parametrize("written", [True, False], ids=["base saved again", "base as it was"])
def test_new_tokens(make_args, tokenizer, base, tmp_path, written):
    """Two tokens are added, and trained; what is saved says the same wherever it is loaded."""
    tokenizer = copy.deepcopy(tokenizer)
    assert tokenizer.add_tokens(NEW) == 2
    new = tokenizer.convert_tokens_to_ids(NEW)
    model = resized(base, len(tokenizer) + 3)  # and a few that stay as they are
    if written:
        model.save_pretrained(tmp_path / "resized")
    tied, before = model.config.tie_word_embeddings, model.get_input_embeddings().weight.clone()
    indices = new if tied else {"embed_tokens": new, "lm_head": new}
    args = make_args(max_steps=3, learning_rate=0.1, beta=0.1, gradient_checkpointing=written)
    trainer = GRPOTrainer(
        str(tmp_path / "resized") if written else model, rows_reward, args, Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(**LORA, trainable_token_indices=indices),
    )  # fmt: skip
    start = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-6
    moved = {n for n, value in trainer.model.named_parameters() if not value.equal(start[n])}
    assert moved == {name for name in start if "lora_" in name or "trainable_tokens_delta" in name}
    assert sum("trainable_tokens_delta" in name for name in moved) == (1 if tied else 2)
    ends = trainer.model.get_base_model()
    embeddings = ends.get_input_embeddings().weight, ends.get_output_embeddings().weight
    assert torch.equal(*embeddings) == tied
    for now in embeddings if tied else embeddings[:1]:
        assert (now != before).any(1).nonzero().flatten().tolist() == new
    trainer.save_model(str(tmp_path / "adapter"))
    expected = logprobs(trainer.model)
    whole = resized(base, len(tokenizer) + 3)
    if written:
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "resized")
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert torch.equal(logprobs(loaded), expected)
    again = GRPOTrainer(
        str(tmp_path / "adapter"), rows_reward, args, Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )  # fmt: skip
    assert torch.equal(logprobs(again.model), expected)
    again.train()
    kl = [row["kl"] for row in again.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-6


TIED = {
    "tokens": {"trainable_token_indices": [1, 5]},
    "a token": {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [5]}},
    "whole head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "whole embeddings": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("trained", [True, False])
def test_tied_ends_stay_tied(make_trainer, tokenizer, tmp_path, kind, trained):
    """Also beside a frozen copy of the adapter, and after a checkpoint."""
    changes = LORA | copy.deepcopy(TIED[kind])
    model = tied_policy(tokenizer)
    if trained:
        model, config = adapted(model, **changes), None
    else:
        config = peft.LoraConfig(**changes)
    trainer = make_trainer(
        lengths_reward, model, CannedEngine(), peft_config=config, beta=0.1, max_steps=3,
        optim="adamw_torch", learning_rate=0.1, save_strategy="steps", lr_scheduler_type="constant",
    )  # fmt: skip
    start = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    for name, value in trainer.model.named_parameters():
        assert value.equal(start[name]) != value.requires_grad, name
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-5
    base = trainer.model.get_base_model()
    ends = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    assert torch.equal(*ends) and not torch.equal(ends[0], tied_policy(tokenizer).lm_head.weight)
    [checkpoint] = (tmp_path / "out").glob("checkpoint-3")
    loaded = peft.PeftModel.from_pretrained(tied_policy(tokenizer), checkpoint)
    assert torch.equal(logprobs(loaded), logprobs(trainer.model))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["lm_head"], "ensure_weight_tying": True},
         "expected modules_to_save or trainable_token_indices with ensure_weight_tying=True"),
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
         "expected modules_to_save or trainable_token_indices with ensure_weight_tying=True"),
        ({"target_modules": ["embed_tokens"], "trainable_token_indices": [3]},
         "peft_config: trainable_token_indices cannot be applied"),
        ({"trainable_token_indices": [3, 99]}, r"expected distinct ids below 14, .* \[3, 99\]"),
        ({"trainable_token_indices": {"lm_head": [3, 3]}}, r"expected distinct ids .* \[3, 3\]"),
        ({"trainable_token_indices": [-1]}, r"expected distinct ids .* \[-1\]"),
    ],
)  # fmt: skip
def test_adapters_that_peft_does_not_train_as_they_say(make_trainer, tokenizer, lora, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(model=tied_policy(tokenizer), peft_config=peft.LoraConfig(**(LORA | lora)))


def test_a_tied_copy_has_no_bias(make_args):
    model = tiny_model("phi")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    config = peft.LoraConfig(**LORA, modules_to_save=["lm_head"], ensure_weight_tying=True)
    config.target_modules = {"q_proj"}
    with pytest.raises(ValueError, match="expected a head without a bias with ensure_weight_tying"):
        load_policy(model, make_args(), config)


@pytest.mark.parametrize("kind", ["tokens", "whole head"])
def test_a_head_that_is_replaced_does_not_cast(make_trainer, tokenizer, kind):
    config = peft.LoraConfig(**LORA, **copy.deepcopy(TIED[kind]))
    message = "cast_lm_head_to_fp32: expected False with an adapter that replaces the head"
    with pytest.raises(ValueError, match=message):
        make_trainer(model=tied_policy(tokenizer), peft_config=config, cast_lm_head_to_fp32=True)


@pytest.mark.parametrize("kind", ["tokens", "whole head"])
def test_a_head_under_an_adapter_casts(make_trainer, tokenizer, kind):
    """Where the adapter was there first, the cast goes around it."""
    model = adapted(tied_policy(tokenizer), **(LORA | copy.deepcopy(TIED[kind])))
    trainer = make_trainer(lengths_reward, model, CannedEngine(), cast_lm_head_to_fp32=True)
    assert runs_in_fp32(trainer.model.get_base_model())
    trainer.train()


def test_an_adapter_of_tokens_without_a_row(make_trainer, base, tokenizer, tmp_path):
    model = peft.get_peft_model(
        resized(base, 20), peft.LoraConfig(**LORA, trainable_token_indices=[15])
    )
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ValueError, match="expected a base model with a row for token 15, .* 14"):
        make_trainer(model=str(tmp_path / "adapter"))


def test_ends_that_differ_are_an_error_before_an_engine_starts(make_trainer, tokenizer):
    config = peft.LoraConfig(**LORA, modules_to_save=["lm_head"])
    with pytest.raises(
        ValueError, match="on lm_head; to keep them tied, set ensure_weight_tying=True in the"
    ):
        make_trainer(model=tied_policy(tokenizer), peft_config=config, use_vllm=True)
