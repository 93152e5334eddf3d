"""Adapters: what is trained and saved, and what the reference is."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import BitsAndBytesConfig, PreTrainedModel

from grpo_trainer import GRPOTrainer
from grpo_trainer.cli.arguments import ModelConfig, get_quantization_config
from grpo_trainer.policy import load_policy
from tests.support.trainer import CannedEngine, adapted, lengths_reward, parameters

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, on tied weights and switched adapters

LORA = dict(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
CONFIGS = {
    "layers": LORA,
    "dora": LORA | dict(use_dora=True),
    "head": LORA | dict(target_modules=["q_proj", "lm_head"]),
    "embedding": LORA | dict(target_modules=["q_proj", "embed_tokens"]),
    "whole head": LORA | dict(modules_to_save=["lm_head"]),
    "pissa": LORA | dict(init_lora_weights="pissa"),  # alters the base model
}


def pretrained(policy: PreTrainedModel, **lora) -> PreTrainedModel:
    """Return a policy with an adapter that was trained before."""
    torch.manual_seed(3)
    return adapted(copy.deepcopy(policy), **(LORA | lora))


@pytest.fixture
def make(make_trainer, policy):
    """Return a trainer on canned completions, with a new adapter unless there is a model."""

    def trainer(model=None, lora=None, **changes) -> GRPOTrainer:
        changes = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"} | changes
        torch.manual_seed(1)
        config = peft.LoraConfig(**(lora or LORA)) if model is None else None
        model = copy.deepcopy(policy) if model is None else model
        return make_trainer(lengths_reward, model, CannedEngine(), peft_config=config, **changes)

    return trainer


@pytest.mark.parametrize("config", [*CONFIGS, "pretrained"])
def test_only_the_adapter_moves_and_the_reference_is_the_start(make, policy, tmp_path, config):
    model = pretrained(policy) if config == "pretrained" else None
    if model is not None:
        next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
    trainer = make(model, CONFIGS.get(config), beta=0.1, max_steps=3, save_strategy="steps")
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    moving = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert moving and trainer.ref_model is None
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, start[name]) != (name in moving), name
        assert parameter.requires_grad == (name in moving)
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-5
    [checkpoint] = (tmp_path / "out").glob("checkpoint-*")
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert not (checkpoint / "model.safetensors").exists()


def test_a_merged_adapter(make, policy):
    """PEFT runs the merged weights, so that the adapter would get no gradient."""
    model = pretrained(policy)
    model.merge_adapter()
    with pytest.raises(ValueError, match="model: expected a PeftModel with an unmerged adapter"):
        make(model)
    model.unmerge_adapter()
    make(model)


def test_the_seed_decides_an_adapters_first_weights(make_trainer, policy):
    def adapter(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(seed)  # whatever was drawn before
        config = peft.LoraConfig(**LORA)
        made = make_trainer(model=copy.deepcopy(policy), peft_config=config, seed=seed // 10)
        return {name: x for name, x in made.model.state_dict().items() if "lora_A" in name}

    first, same, other = adapter(31), adapter(32), adapter(41)
    assert first and all(torch.equal(x, same[name]) for name, x in first.items())
    assert not any(torch.equal(x, other[name]) for name, x in first.items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(make, reentrant):
    def after(**changes) -> torch.Tensor:
        trainer = make(max_steps=2, **changes)
        trainer.train()
        return parameters(trainer.model)

    recomputed = after(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    torch.testing.assert_close(recomputed, after(), rtol=0, atol=1e-6)


def test_disable_dropout_reaches_the_adapter(make):
    trainer = make(lora=LORA | dict(lora_dropout=0.5), disable_dropout=True)
    assert all(m.p == 0 for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))


def test_quantization_by_arguments(make_args, monkeypatch):
    available = "grpo_trainer.cli.arguments.is_bitsandbytes_available"
    monkeypatch.setattr(available, lambda: False)
    for name in ("load_in_4bit", "load_in_8bit"):
        with pytest.raises(ValueError, match=f"^{name}: .* pip install bitsandbytes$"):
            ModelConfig(use_peft=True, **{name: True})
    monkeypatch.setattr(available, lambda: True)
    arguments = ModelConfig(use_peft=True, load_in_4bit=True, use_bnb_nested_quant=True)
    config = get_quantization_config(arguments, make_args())
    assert config.load_in_4bit and config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.float32
    arguments.dtype = "bfloat16"
    assert get_quantization_config(arguments).bnb_4bit_compute_dtype == torch.bfloat16
    assert get_quantization_config(ModelConfig(use_peft=True, load_in_8bit=True)).load_in_8bit
    assert get_quantization_config(ModelConfig(use_peft=True), make_args()) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lora_r=4), "lora_r: expected use_peft"),
        (dict(load_in_4bit=True), "load_in_4bit: expected use_peft"),
        (dict(use_peft=True, use_bnb_nested_quant=True), "expected load_in_4bit with it"),
        (dict(use_peft=True, load_in_4bit=True, load_in_8bit=True), "at most one"),
        (dict(use_peft=True, load_in_4bit=True, bnb_4bit_quant_type="int4"), "one of fp4, nf4"),
        (
            dict(use_peft=True, load_in_4bit=True, bnb_4bit_quant_storage="int9"),
            r"bnb_4bit_quant_storage: .*; got 'int9' \(is it int8",
        ),
        (dict(use_peft=True, lora_r=0), "lora_r: expected an integer >= 1, got 0"),
    ],
)
def test_wrong_command_line_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**arguments)


def test_quantization_of_a_model(make_args, policy, tmp_path, monkeypatch):
    config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.warns(UserWarning, match="quantization_config: no effect on a model inst"):
        load_policy(policy, make_args(), quantization_config=config)
    policy.save_pretrained(tmp_path / "model")
    missing = "transformers.quantizers.quantizer_bnb_8bit.is_bitsandbytes_available"
    monkeypatch.setattr(missing, lambda: False)
    with pytest.raises(ValueError, match="quantization_config: .*bitsandbytes"):
        load_policy(str(tmp_path / "model"), make_args(), quantization_config=config)


@pytest.fixture
def make_quantized(make_trainer, policy, tmp_path):
    """Return a trainer of an adapter on a base that bitsandbytes has quantized."""
    policy.save_pretrained(tmp_path / "model")

    def trainer(lora=None, config=NF4, **changes) -> GRPOTrainer:
        changes = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"} | changes
        return make_trainer(
            lengths_reward,
            str(tmp_path / "model"),
            CannedEngine(),
            peft_config=peft.LoraConfig(**(lora or LORA)),
            quantization_config=config,
            **changes,
        )

    return trainer


NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)


@pytest.mark.parametrize("config", [NF4, BitsAndBytesConfig(load_in_8bit=True)], ids=["4", "8"])
def test_an_adapter_on_a_quantized_base(make_quantized, config, tmp_path):
    """It trains, what is saved is the adapter, and a resumed run is the straight run."""
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = make_quantized(config=config, **steps)
    kinds = {type(module).__name__ for module in straight.model.modules()}
    assert "Linear4bit" in kinds if config is NF4 else "Linear8bitLt" in kinds
    start = {name: p.detach().clone() for name, p in straight.model.named_parameters()}
    straight.train()
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(parameter, start[name]) != ("lora_" in name), name
        assert parameter.dtype == torch.bfloat16 or "lora_" not in name
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert not list(checkpoint.glob("model*.safetensors"))
    resumed = make_quantized(config=config, **steps)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    ends = [dict(trainer.model.named_parameters()) for trainer in (straight, resumed)]
    assert all(ends[1][name].equal(parameter) for name, parameter in ends[0].items())


def test_the_gradient_on_a_quantized_base(make_quantized, policy):
    """It is that on the same weights, as they are in 4 bits, in full precision."""
    trainer = make_quantized(max_steps=1)
    twin = adapted(copy.deepcopy(policy), **LORA)
    for name, layer in trainer.model.get_base_model().named_modules():
        if isinstance(layer, Linear4bit):
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            twin.get_base_model().get_submodule(name).weight.data = weight
    factors = {name: x for name, x in trainer.model.state_dict().items() if "lora_" in name}
    assert factors and not twin.load_state_dict(factors, strict=False).unexpected_keys
    ids = torch.arange(3, 15)[None] % policy.config.vocab_size
    for model in (trainer.model, twin):
        model.eval()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
    expected = dict(twin.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            error = (parameter.grad.float() - expected[name].grad).norm()
            assert error < 0.02 * expected[name].grad.norm(), name


def test_dora_on_a_quantized_base(make_quantized):
    """Its magnitudes stay in fp32: bf16 would round their updates away."""
    model = make_quantized(CONFIGS["dora"]).model
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert dtypes and all(
        dtype == (torch.float32 if "magnitude" in name else torch.bfloat16)
        for name, dtype in dtypes.items()
    )


def test_a_quantized_base_without_an_adapter(make_args, policy, tmp_path):
    policy.save_pretrained(tmp_path / "model")
    for model in (str(tmp_path / "model"), None):
        if model is None:
            model = type(policy).from_pretrained(tmp_path / "model", quantization_config=NF4)
        config = NF4 if isinstance(model, str) else None
        with pytest.raises(
            ValueError, match="peft_config: expected an adapter with a quantized model"
        ):
            load_policy(model, make_args(), quantization_config=config)


def test_loading_adapters_keeps_their_dtype(make, tmp_path):
    trainer = make()
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    trainer.save_model(str(tmp_path / "saved"))
    before = parameters(trainer.model)
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    dtypes = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert dtypes == {torch.bfloat16} and torch.equal(parameters(trainer.model), before)
    with pytest.raises(ValueError, match="expected adapter 'default'"):
        trainer._load_from_checkpoint(str(tmp_path))
