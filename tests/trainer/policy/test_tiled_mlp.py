"""MLPs over tiles of tokens: the gradients of whole ones, a bound on memory, what is tiled."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3 import modeling_qwen3

from grpo_kernels.hf import TOKEN_WISE_MLPS
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.policy import load_policy, tiled_mlp
from grpo_trainer.policy.load import base_policy
from grpo_trainer.policy.tiled_mlp import tile_mlps
from tests.support import tiny_models, vision
from tests.support.trainer import CannedEngine, lengths_reward, parameters
from tests.tools.test_plan import LiveBytes

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, and of older names of checkpointing

OF_CLASS = {
    "ApertusMLP": "apertus", "ArceeMLP": "arcee", "Cohere2MLP": "cohere2", "CohereMLP": "cohere",
    "Ernie4_5MLP": "ernie4_5", "Exaone4MLP": "exaone4", "Gemma2MLP": "gemma2",
    "Gemma3MLP": "gemma3_text", "GemmaMLP": "gemma", "Glm4MLP": "glm4", "GlmMLP": "glm",
    "GraniteMLP": "granite", "HeliumMLP": "helium", "HunYuanDenseV1MLP": "hunyuan_v1_dense",
    "LlamaMLP": "llama", "Ministral3MLP": "ministral3", "MinistralMLP": "ministral",
    "MistralMLP": "mistral", "NemotronMLP": "nemotron", "Olmo2MLP": "olmo2", "Olmo3MLP": "olmo3",
    "OlmoMLP": "olmo", "Phi3MLP": "phi3", "PhiMLP": "phi", "Qwen2MLP": "qwen2", "Qwen3MLP": "qwen3",
    "Qwen3_5MLP": "qwen3_5_text", "SeedOssMLP": "seed_oss", "SmolLM3MLP": "smollm3",
    "StableLmMLP": "stablelm", "Starcoder2MLP": "starcoder2", "VaultGemmaMLP": "vaultgemma",
}  # fmt: skip
WITH_IMAGES = {"Qwen3VLTextMLP": "qwen3_vl", "Qwen2MLP": "qwen2_5_vl", "Gemma3MLP": "gemma3"}
REFUSED = {
    "qwen3_moe": "a Qwen3MoeSparseMoeBlock in Qwen3MoeForCausalLM",
    "mixtral": "a MixtralSparseMoeBlock in MixtralForCausalLM",
    "gpt_oss": "a GptOssMLP in GptOssForCausalLM",
    "lfm2": "a Lfm2DecoderLayer without mlp in Lfm2ForCausalLM",
    "gpt2": "no list of layers in GPT2LMHeadModel",
}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.5}
MLP = ["gate_proj", "up_proj", "down_proj"]


def family(name: str) -> PreTrainedModel:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    dropout = {"residual_dropout": 0.0} if name == "seed_oss" else {}
    config = CONFIG_MAPPING[name](**tiny_models.SMALL, **dropout)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


def qwen3(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen3"](**(tiny_models.SMALL | changes))
    return AutoModelForCausalLM.from_config(config).train()


def tiled(model: PreTrainedModel, tokens: int) -> PreTrainedModel:
    made = copy.deepcopy(model)
    tile_mlps(base_policy(made), tokens)
    return made


def gradients(model: nn.Module, rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of logits, and the logits under ``""``."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (rows, length), generator=draw)
    torch.manual_seed(2)  # of dropout
    logits = model(input_ids=ids, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=draw)
    (logits * weights.to(logits.dtype)).sum().backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return found | {"": logits.detach()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    """Compare in the L2 norm; ``error`` 0 is about bits."""
    assert found.keys() == expected.keys() and len(found) > 1
    for name, value in expected.items():
        assert (found[name] - value).norm() <= error * value.norm(), name


def rows_seen(model: nn.Module) -> Counter[int]:
    """Count the rows of each call of the first product of an MLP, from now on."""
    seen: Counter[int] = Counter()
    for module in model.modules():
        if type(module).__name__ in TOKEN_WISE_MLPS:
            first = next(each for each in module.modules() if isinstance(each, nn.Linear))
            first.register_forward_pre_hook(lambda _, args: seen.update([args[0][..., 0].numel()]))
    return seen


def test_every_class_has_a_model() -> None:
    assert set(TOKEN_WISE_MLPS) == OF_CLASS.keys() | WITH_IMAGES.keys()


@pytest.mark.parametrize("name", OF_CLASS)
def test_every_class_has_the_gradients_of_whole_rows(name: str) -> None:
    model = family(OF_CLASS[name])
    tiles = tiled(model, 4)
    seen = rows_seen(tiles)
    assert_close(gradients(tiles), gradients(model), 1e-13)
    layers = len(tiles.get_decoder().layers)
    assert seen == {4: 2 * 5 * layers, 1: 2 * layers}  # forward and again
    assert type(tiles.get_decoder().layers[0].mlp).__name__ == name
    assert list(tiles.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_of_a_model_with_images_the_text_is_tiled(name: str) -> None:
    model = vision.tiny_model(WITH_IMAGES[name]).train()
    tiles = tiled(model, 4)
    changed = [key for key, x in tiles.named_modules() if isinstance(x, tiled_mlp._Tiled)]
    assert changed and all(key.endswith(".mlp") and "visi" not in key for key in changed)
    assert {type(tiles.get_submodule(key)).__name__ for key in changed} == {name}
    assert_close(gradients(tiles), gradients(model), 1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_other_classes_are_an_error(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    sizes = tiny_models.SMALL | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes))
    with pytest.raises(ValueError, match=f"mlp_tile_tokens: .*LlamaMLP.*, got {REFUSED[name]}"):
        tile_mlps(model, 4)
    assert not any(isinstance(module, tiled_mlp._Tiled) for module in model.modules())


def test_a_class_of_somebody_else_or_with_a_patch_is_an_error() -> None:
    class Qwen3MLP(type(qwen3().model.layers[0].mlp)):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.cumsum(-2))

    model = qwen3()
    model.model.layers[1].mlp.__class__ = Qwen3MLP
    with pytest.raises(ValueError, match="got a Qwen3MLP in"):
        tile_mlps(model, 4)
    model = qwen3()
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    with pytest.raises(ValueError, match="got a Qwen3MLP with a patched forward in"):
        tile_mlps(model, 4)


@pytest.mark.parametrize("checkpointing", ["off", "on", "reentrant", "every second layer"])
def test_numbers_of_tokens(checkpointing: str) -> None:
    """With non-reentrant checkpointing no MLP runs a third time."""
    model = qwen3().double()
    runs = 3 if checkpointing == "reentrant" else 2
    for rows, length in ((3, 7), (1, 1)):
        count = rows * length
        expected = gradients(copy.deepcopy(model), rows, length)
        for tokens in {1, 4, count - 1, count, count + 1} - {0}:
            tiles = tiled(model, tokens)
            if checkpointing != "off":
                tiles.gradient_checkpointing_enable({"use_reentrant": runs == 3})
            if checkpointing == "every second layer":
                tiles.model.layers[1].gradient_checkpointing = False
            seen = rows_seen(tiles)
            assert_close(gradients(tiles, rows, length), expected, 1e-13)
            assert max(seen) == min(tokens, count)
            assert seen.total() == runs * len(model.model.layers) * -(-count // tokens)


def test_without_gradients_each_tile_runs_once() -> None:
    model = qwen3().double()
    tiles = tiled(model, 4)
    seen = rows_seen(tiles)
    ids = torch.arange(3, 24).view(3, 7)
    with torch.no_grad():
        torch.testing.assert_close(tiles(ids).logits, model(ids).logits, rtol=1e-13, atol=1e-13)
    assert seen == {4: 10, 1: 2}


def test_a_gradient_is_added_to_a_parameter_once() -> None:
    tiles = tiled(qwen3(), 4)
    times: Counter[str] = Counter()
    for name, parameter in tiles.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: times.update([name]))
    gradients(tiles)
    assert times == {name: 1 for name, _ in tiles.named_parameters()}


def adapted(model: PreTrainedModel, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(**(LORA | changes), target_modules=MLP))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # else their gradients alone are not 0
                parameter.normal_(std=0.1)
    model.enable_input_require_grads()
    return model


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):
    """Return a function that gives gradients where each tile keeps what is inside of it."""

    def find(model: nn.Module) -> dict[str, Tensor]:
        with monkeypatch.context() as patched:
            patched.setattr(tiled_mlp, "checkpoint", lambda run, *args, **options: run(*args))
            return gradients(model)

    return find


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_an_adapter_comes_again(kept: Any, checkpointing: bool) -> None:
    tiles = tiled(adapted(qwen3().double()), 4)
    expected = kept(copy.deepcopy(tiles))
    if checkpointing:
        tiles.gradient_checkpointing_enable()
    assert_close(gradients(tiles), expected, 1e-13)


def test_an_adapter_without_dropout_on_a_frozen_model() -> None:
    model = adapted(qwen3().double(), lora_dropout=0.0)
    found = gradients(tiled(model, 4))
    assert_close(found, gradients(model), 1e-13)
    assert all("lora" in name for name in found if name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_is_the_same_again(kept: Any, checkpointing: bool) -> None:
    tiles = tiled(qwen3(), 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = kept(copy.deepcopy(tiles))
        if checkpointing:
            tiles.gradient_checkpointing_enable()
        # no other bits: each tile has the same products again
        assert_close(gradients(tiles), expected, 0.0)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_layers(bits: int, tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    qwen3(**sizes).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            **{f"load_in_{bits}bit": True}, bnb_4bit_compute_dtype=torch.float32
        ),
    ).train()
    model = adapted(model, lora_dropout=0.0)
    expected = gradients(model)
    model.zero_grad()
    tile_mlps(base_policy(model), 4)
    model.gradient_checkpointing_enable()
    # 8-bit layers round rows together: an outlier of one changes the others
    assert_close(gradients(model), expected, 1e-5 if bits == 4 else 0.05)


def peak(model: PreTrainedModel, tokens: int) -> int:
    there = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
    with LiveBytes(*there) as live:
        hidden = model.model(input_ids=torch.ones(1, tokens, dtype=torch.long)).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
    return live.growth


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_inside_of_an_mlp_is_bounded_by_the_tile(checkpointing: bool) -> None:
    """Bytes of a token do not grow with the width of the MLP; whole they do."""

    def per_token(inner: int, tile: int | None) -> float:
        model = qwen3(intermediate_size=inner)
        tile_mlps(model, tile)
        if checkpointing:
            model.gradient_checkpointing_enable()
        peak(model, 2)  # the gradients of parameters are there from now on
        return (peak(model, 512) - peak(model, 256)) / 256

    narrow, wide = 256, 1024
    whole = per_token(wide, None) - per_token(narrow, None)
    layers = 1 if checkpointing else 2
    assert whole >= layers * 4 * 4 * (wide - narrow)  # four fp32 tensors: gate, up, both products
    assert per_token(wide, 32) == per_token(narrow, 32)


@pytest.fixture
def train(make_trainer):
    def train(**changes: Any) -> Any:
        settings = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
        model = changes.pop("model", None) or make_policy(make_tokenizer(), seed=0)
        trainer = make_trainer(lengths_reward, model, CannedEngine(), **(settings | changes))
        trainer.train()
        return trainer

    return train


@pytest.mark.parametrize(("packing", "checkpointing"), [("padded", False), ("packed", True)])
def test_a_trainer_takes_the_same_steps(train, packing: str, checkpointing: bool) -> None:
    settings = {"packing": packing, "gradient_checkpointing": checkpointing, "beta": 0.1}
    whole, tiles = train(**settings), train(**settings, mlp_tile_tokens=5)
    assert isinstance(tiles.model.model.layers[0].mlp, tiled_mlp._Tiled)
    reference = tiles.ref_model.model.layers[0].mlp
    assert isinstance(reference, tiled_mlp._Tiled)
    assert reference.gate_proj is not tiles.model.model.layers[0].mlp.gate_proj
    torch.testing.assert_close(parameters(tiles.model), parameters(whole.model), rtol=0, atol=1e-6)


def test_a_teacher_is_tiled_and_another_trainer_is_not(train, make_args) -> None:
    teacher = make_policy(make_tokenizer(), seed=1)
    trainer = train(teacher=teacher, mlp_tile_tokens=5)
    assert isinstance(teacher.model.layers[0].mlp, tiled_mlp._Tiled)
    assert isinstance(trainer.model.model.layers[0].mlp, tiled_mlp._Tiled)
    again = train(model=trainer.model, teacher=teacher)
    for model in (again.model, teacher):
        assert not any(isinstance(module, tiled_mlp._Tiled) for module in model.modules())


def test_a_model_that_cannot_be_tiled_is_an_error_on_construction(make_args) -> None:
    experts = tiny_models.tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match="mlp_tile_tokens: expected .* Qwen3MoeSparseMoeBlock"):
        load_policy(experts, make_args(mlp_tile_tokens=4))
    assert load_policy(experts, make_args()) is experts


def test_liger_leaves_the_mlps_alone(make_args) -> None:
    pytest.importorskip("liger_kernel")
    from transformers.integrations.liger import apply_liger_kernel

    args = make_args(mlp_tile_tokens=4, use_liger_kernel=True)
    model = load_policy(qwen3(), args)
    with patch.dict(vars(modeling_qwen3)):  # Liger replaces names of the model's module
        apply_liger_kernel(model, args.liger_kernel_config)  # when training begins
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    assert "forward" not in vars(mlp) and "forward" in vars(norm)
    with pytest.raises(ValueError, match=r"liger_kernel_config\['swiglu'\]: expected False"):
        make_args(mlp_tile_tokens=4, use_liger_kernel=True, liger_kernel_config={"swiglu": True})
