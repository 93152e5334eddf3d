"""What a trainer refuses to be made of or to train on, by the argument that is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import ProcessorMixin, TrainingArguments

from grpo_trainer.demo.policy import make_tokenizer
from tests.support.trainer import BackgroundEngine, CannedEngine, adapted, lengths_reward

peft = pytest.importorskip("peft")

LORA = dict(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
TUNED = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
HEAD_WITH_DROPOUT = LORA | dict(target_modules=["lm_head"], lora_dropout=0.1)
OVERLAP = {"generation_batches_ahead": 1}


class Processor(ProcessorMixin):
    """Of images and text."""

    def __init__(self) -> None: ...


async def later(prompts: Any, trainer: Any) -> None: ...


def tool() -> str:
    """Do nothing."""
    return ""


def stream(given: Any) -> Any:
    return given.dataset.to_iterable_dataset()


def hooked(given: Any) -> dict[str, Any]:
    given.policy.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    return {}


def no_special_tokens(given: Any) -> dict[str, Any]:
    given.tokenizer.pad_token = given.tokenizer.eos_token = None
    return {}


def no_end(given: Any) -> dict[str, Any]:
    tokenizer, policy = given.tokenizer, given.policy
    tokenizer.eos_token, tokenizer.pad_token = None, "0"
    policy.generation_config.eos_token_id = policy.config.eos_token_id = None
    return {}


def with_ref(given: Any) -> dict[str, Any]:
    model = adapted(given.policy, **LORA)
    model.add_adapter("ref", peft.LoraConfig(**LORA))
    return {"model": model, "beta": 0.1}


def integrated(given: Any) -> dict[str, Any]:
    """Do as model.add_adapter does, which in transformers 5.24 needs a peft that is not out."""
    peft.inject_adapter_in_model(peft.LoraConfig(**LORA), given.policy)
    given.policy._hf_peft_config_loaded = True
    return {}


def prompted(prompt: Any, **columns: Any) -> dict[str, Any]:
    return {"train_dataset": Dataset.from_list([{"prompt": prompt} | columns] * 4)}


def shown(*parts: dict[str, str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT, IMAGE = {"type": "text", "text": "1="}, {"type": "image", "text": ""}
NO_PROCESSOR = "train_dataset: expected no images without a processor as processing_class, got"


# changes, or what makes them of the policy, the tokenizer and the dataset -> the message
REFUSED = [
    (lambda given: {"train_dataset": given.dataset.rename_column("prompt", "question")},
     "`prompt` column, got columns question, answer; rename the one that has the pr"),
    (lambda given: {"train_dataset": given.dataset.select([])}, "at least 1 prompts"),
    ({"train_dataset": [{"prompt": "1="}]},
     r"expected a datasets\.Dataset or IterableDataset, got list"),
    (lambda given: {"train_dataset": stream(given).map(lambda row: row, remove_columns=["prompt"])},
     "expected a `prompt` column, got columns answer"),
    (lambda given: {"train_dataset": stream(given), "max_steps": -1},
     "max_steps: expected the number of steps, .* got -1"),
    (no_special_tokens, "processing_class: expected a pad_token or an eos_token"),
    (no_end, "processing_class: expected an eos_token .or an eos_tok"),
    (hooked, "its head is not supported"),
    ({"reward_weights": [1, 2]}, "reward_weights: expected 1"),
    ({"router_aux_loss_coef": 0.1},
     "router_aux_loss_coef: expected None or 0 .* got 0.1 for Qwen3ForCausalLM"),
    ({"use_rollout_routing_replay": True},
     "use_rollout_routing_replay: expected use_vllm=True or .* the transformers engine"),
    ({"use_rollout_routing_replay": True, "rollout_engine": CannedEngine()},
     "use_rollout_routing_replay: expected False for a model that is not a mixture .* 'qwen3'"),
    ({"use_rollout_routing_replay": True, "use_vllm": True, "rollout_func": print},
     "rollout_func: expected none with use_rollout_routing_replay"),
    (OVERLAP, "generation_batches_ahead: .*own.*got TransformersEngine"),
    ({"rollout_func": later}, "rollout_func: expected a plain function"),
    ({"rollout_func": 3}, "rollout_func: expected a plain function"),
    ({"rollout_func": len, "tools": [tool]}, "rollout_func: expected neither tools nor"),
    ({"peft_config": {"r": 2}}, r"peft_config: expected a peft\.PeftConfig.*got dict"),
    ({"peft_config": TUNED}, "virtual tokens"),
    (lambda given: {"model": adapted(given.policy, **LORA), "peft_config": TUNED},
     "peft_config: expected None with a PeftModel"),
    (lambda given: {"model": adapted(given.policy, **LORA).requires_grad_(False)},
     "is_trainable=True"),
    ({"peft_config": peft.LoraConfig(**LORA), "beta": 0.1, "sync_ref_model": True},
     "sync_ref_model: expected False with an adapter"),
    ({"peft_config": peft.LoraConfig(**HEAD_WITH_DROPOUT)}, r"lora_dropout=0\.1"),
    (with_ref, "no adapter named 'ref'"),
    (integrated, r"PeftModel\.from_pretrained"),
    ({"args": {"output_dir": "out"}}, "args: expected a grpo_trainer.GRPOConfig, got a <class"),
    ({"args": TrainingArguments("out", use_cpu=True)}, "args: .*got a <class 'transformers"),
    ({"processing_class": "gpt2"}, "processing_class: .*a tokenizer or a processor, got a <class"),
    ({"processing_class": Processor()}, "processing_class: .*with a tokenizer, got a Processor"),
    (prompted("1=", image="a"), NO_PROCESSOR),
    (prompted("1=", images=["a"]), NO_PROCESSOR),
    (prompted(shown(TEXT, IMAGE)), NO_PROCESSOR),
]  # fmt: skip
# what only training finds
UNTRAINABLE = [
    (prompted(""), "prompt: expected at least one token, got none from ''"),
    (prompted("1" * 61),
     r"prompt: expected at most 60 tokens \(the model's 64 positions less max_completion_length = "
     r"4\), got 61 tokens from '111"),
    ({"max_completion_length": 64},
     "max_completion_length: expected less than the model's 64 positions, .*, got 64"),
    ({"train_dataset": None}, "train_dataset: .*prompts to train on .* got None"),
    (OVERLAP | {"rollout_engine": BackgroundEngine(make_tokenizer())},
     "generation_batches_ahead: .*reports log-probabilities"),
    ({"loss_type": "dppo_tv"}, "rollout_logprobs: .*dppo_tv computes its ratio from"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[row[1][:50] for row in REFUSED])
def test_it_is_refused(make_trainer, policy, tokenizer, dataset, changes, message) -> None:
    if callable(changes):
        changes = changes(SimpleNamespace(policy=policy, tokenizer=tokenizer, dataset=dataset))
    with pytest.raises(ValueError, match=message):
        make_trainer(lengths_reward, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    UNTRAINABLE,
    ids=["empty", "long", "no room", "none", "unreported", "engine"],
)
def test_it_cannot_be_trained_on(make_trainer, changes, message) -> None:
    trainer = make_trainer(lengths_reward, **changes)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_what_is_nearly_refused_trains(make_trainer, tokenizer) -> None:
    tokenizer.pad_token = None  # padded with the end-of-sequence token, behind the attention mask
    nearly = {"max_prompt_length": 8, "router_aux_loss_coef": 0.0, **prompted("1" * 61)}
    make_trainer(lengths_reward, **nearly).train()
    tokenizer.eos_token, tokenizer.pad_token = None, "0"
    make_trainer()  # the model names the end


def test_no_adapter_without_peft(make_trainer, monkeypatch) -> None:
    monkeypatch.setattr("grpo_trainer.policy.load.is_peft_available", lambda: False)
    with pytest.raises(ValueError, match="expected the package peft to be installed"):
        make_trainer(peft_config=peft.LoraConfig(**LORA))


def test_an_adapter_of_no_layer(make_trainer) -> None:
    with pytest.raises(ValueError, match="peft_config: Target modules .*q_projj"):
        make_trainer(peft_config=peft.LoraConfig(**LORA | {"target_modules": ["q_projj"]}))
