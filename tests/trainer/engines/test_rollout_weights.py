"""What engines are sent: the checkpoint that the policy would be."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BitsAndBytesConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_trainer import GRPOConfig
from grpo_trainer.engines import Sampler, adapter_weights, policy_weights
from grpo_trainer.policy import WHOLE
from grpo_trainer.vllm import transfer as weight_files
from grpo_trainer.vllm.transfer import FileTransfer, adapter_rank
from tests.support.trainer import adapted, products

SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8,
)  # fmt: skip


def saved(model, folder) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same(sent, expected, **tolerance) -> None:
    assert set(sent) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_model(tmp_path, tied):
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    sent = dict(policy_weights(model))
    expected = saved(model, tmp_path)
    if tied:  # engines may keep a copy of the head
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert_same(sent, expected)
    own = {value.data_ptr() for value in model.parameters()}
    assert {value.data_ptr() for value in sent.values()} == own  # nothing is copied


def test_experts_are_sent_as_checkpoints_have_them(tmp_path):
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[]
    )
    model = Qwen3MoeForCausalLM(config)
    assert_same(dict(policy_weights(model)), saved(model, tmp_path))


def lora(model, **changes):
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1}
    return adapted(model, **(settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True, "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "bias": "all"},
    ],
)
def test_adapters_are_merged_and_the_policy_is_as_before(tmp_path, changes):
    model = lora(Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True)), **changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sent = {name: value.clone() for name, value in policy_weights(model)}
    assert_same(model.state_dict(), before)
    assert_same(sent, saved(model.merge_and_unload(), tmp_path), rtol=1e-6, atol=1e-6)


IDS = [31, 4]
ENDS = {
    "tokens": {"trainable_token_indices": IDS},
    "tokens of both ends": {"trainable_token_indices": {"embed_tokens": IDS, "lm_head": IDS}},
    "whole embeddings": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "whole head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
}


@pytest.mark.filterwarnings("ignore")  # peft's, on models that are not tied
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", ENDS.values(), ids=ENDS)
def test_new_rows_and_tied_ends_are_merged(tmp_path, tied, changes):
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    plain = model.model.embed_tokens.weight.clone()
    model = lora(model, **copy.deepcopy(changes))
    model.add_adapter("another", model.peft_config["default"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sent = {name: value.clone() for name, value in policy_weights(model)}
    assert_same(model.state_dict(), before)
    ids = torch.arange(SIZES["vocab_size"])[None]
    expected = model.eval()(input_ids=ids).logits
    fresh = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    fresh.load_state_dict(sent)  # all names, and no other
    torch.testing.assert_close(fresh(input_ids=ids).logits, expected)
    ends = sent["model.embed_tokens.weight"], sent["lm_head.weight"]
    assert torch.equal(*ends) == tied
    if "trainable_token_indices" in changes:
        moved = (ends[0] != plain).any(1).nonzero().flatten()
        assert moved.tolist() == sorted(IDS)


@pytest.mark.filterwarnings("ignore")  # peft's, on tied weights
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}},
        {"target_modules": ["lm_head"]},
    ],
)
def test_ends_of_another_adapter_are_left_out(tied, changes):
    """Such as a teacher's, which replaces layers that the policy's adapter leaves alone."""
    model = lora(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)))
    expected = {name: value.clone() for name, value in policy_weights(model)}
    peft = pytest.importorskip("peft")
    model.add_adapter("teacher", peft.LoraConfig(**({"target_modules": ["q_proj"]} | changes)))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "teacher" in name:
                value.normal_()
    assert_same({name: value.clone() for name, value in policy_weights(model)}, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["embed_tokens"]},
         "no adapter on tied embeddings.*model.embed_tokens; to keep them tied"),
        ({"target_modules": ["lm_head"]}, "no adapter on tied embeddings.* lm_head"),
        ({"modules_to_save": ["lm_head", "embed_tokens"]},
         "no adapter on tied embeddings.*model.embed_tokens, lm_head; to keep them tied"),
        ({"trainable_token_indices": {"lm_head": [3]}},
         "no adapter on tied embeddings.* lm_head"),
        ({"trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}},
         "no adapter on tied embeddings.*model.embed_tokens, lm_head"),
        ({"trainable_token_indices": [3], "target_modules": ["lm_head"]},
         "expected whole layers for use_vllm, got lm_head.base_layer"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # peft's, on tied weights
def test_adapters_that_cannot_be_merged(changes, message):
    config = Qwen3Config(**SIZES, tie_word_embeddings=True)
    model = lora(Qwen3ForCausalLM(config), **changes)
    with pytest.raises(ValueError, match=message):
        dict(policy_weights(model))


PATTERNS = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 3}}


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "lora_alpha": 3}, PATTERNS])
def test_an_adapter_alone_is_what_is_merged(changes):
    """Its factors on the base's weights, whatever scales them and whatever other adapters are."""
    model = lora(Qwen3ForCausalLM(Qwen3Config(**SIZES)), **changes)
    model.add_adapter("another", model.peft_config["default"])
    expected = dict(policy_weights(model))
    base, factors = dict(policy_weights(model, merged=False)), dict(adapter_weights(model))
    assert len(factors) == 2 * 3 * SIZES["num_hidden_layers"]
    assert_same(base | products(factors, base), expected, rtol=1e-6, atol=1e-7)


class _Engine:
    """Remembers what it is sent."""

    def __init__(self, **attributes) -> None:
        vars(self).update(attributes)
        self.sent: list[tuple[bool, int]] = []

    def update_weights(self, weights, adapter=False) -> None:
        for _ in range(2):  # as who has to know all shapes first
            size = size_of(value for _, value in weights())
        self.sent.append((adapter, size))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_sent_of_an_adapter(keeps):
    """The base comes once, and again where it was not kept or a checkpoint was loaded."""
    model = lora(Qwen3ForCausalLM(Qwen3Config(**SIZES)))
    engine = _Engine(takes_adapter=True, keeps_weights=keeps)
    context = SimpleNamespace(policy=lambda: model, placement=WHOLE)
    sampler = Sampler(engine, context, None, step=lambda: 0, name="")
    trained = [value for value in model.parameters() if value.requires_grad]
    base = (False, size_of(dict(policy_weights(model)).values()))
    factors = (True, size_of(trained))
    for loads in (False, False, True):
        if loads:
            sampler.outdated()
        with torch.no_grad():
            trained[0].add_(1.0)
        sampler.send()
        assert sampler._sent == (factors[1] if keeps else base[1] + factors[1])
    assert engine.sent == [base, factors, *[base] * (not keeps), factors, base, factors]
    sampler.send()  # nothing has changed
    assert len(engine.sent) == (5 if keeps else 8)


def room(model, setting="auto", ranks=(8, 16)) -> int:
    context = SimpleNamespace(
        policy=lambda: model,
        args=GRPOConfig(use_cpu=True, report_to="none", use_vllm=True, vllm_lora_transfer=setting),
    )
    return adapter_rank(context, lambda: ranks)


NO_FACTOR = "is not a factor of plain LoRA on a linear layer of the body"


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({"use_dora": True}, [8], f"q_proj.lora_A.default.weight {NO_FACTOR}"),
        ({"modules_to_save": ["norm"]}, [8], f"norm.modules_to_save.default.weight {NO_FACTOR}"),
        ({"target_modules": ["lm_head"]}, [8], f"lm_head.lora_A.default.weight {NO_FACTOR}"),
        ({"target_modules": ["embed_tokens"]}, [8], f"lora_embedding_A.default {NO_FACTOR}"),
        ({"trainable_token_indices": [3]}, [8], f"trainable_tokens_delta.default {NO_FACTOR}"),
        ({"lora_bias": True}, [8], f"lora_B.default.bias {NO_FACTOR}"),
        ({"bias": "all"}, [8], f"q_proj.base_layer.bias {NO_FACTOR}"),
        ({"r": 17}, [8, 16], "rank is 17, and vLLM is configured for at most 16"),
        (PATTERNS, [1, 4], "rank is 5, and vLLM is configured for at most 4"),
        ({}, "it has no room for any", "it has no room for any"),
    ],
)
def test_adapters_that_are_merged(changes, ranks, reason, caplog):
    model = lora(Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True)), **changes)
    assert room(model, "merged", ranks) == 0 and not caplog.messages
    assert room(model, "auto", ranks) == 0
    [said] = caplog.messages
    assert said.startswith("vllm_lora_transfer: merging the adapter") and reason in said
    with pytest.raises(ValueError, match=f"vllm_lora_transfer: expected an adapter .*{reason}"):
        room(model, "adapter", ranks)


@pytest.mark.parametrize(
    ("changes", "setting", "ranks", "message"),
    [
        ({}, "merged", [8], "vllm_lora_transfer: expected auto or adapter with a quantized base"),
        ({"use_dora": True}, "auto", [8], f"use_vllm: expected a LoRA adapter .*{NO_FACTOR}"),
        ({"r": 9}, "auto", [8], "use_vllm: .*rank is 9, and vLLM is configured for at most 8"),
        ({}, "auto", "it has no room", "use_vllm: .*but it has no room; generate with"),
        ({}, "adapter", "it has no room", "vllm_lora_transfer: .*but it has no room"),
    ],
)
def test_adapters_that_cannot_be_merged_into_4_bits(changes, setting, ranks, message, quantized):
    model = lora(quantized, **changes)
    with pytest.raises(ValueError, match=message):
        room(model, setting, ranks)
    with pytest.raises(ValueError, match="policy: expected weights in full precision"):
        policy_weights(model)


def test_an_adapter_on_a_quantized_base_goes_alone(quantized):
    """The engine loads the base; its factors are B times the scaling, in the adapter's dtype."""
    model = lora(quantized, r=4, lora_alpha=8, target_modules="all-linear")
    assert room(model) == 8
    engine = _Engine(takes_adapter=True, has_base=True)
    context = SimpleNamespace(policy=lambda: model, placement=WHOLE)
    sampler = Sampler(engine, context, None, step=lambda: 0, name="")
    trained = [value for value in model.parameters() if value.requires_grad]
    for engine.keeps_weights in (True, False):
        sampler.outdated()
        sampler.send()
        assert sampler._sent == size_of(trained)
    assert engine.sent == [(True, size_of(trained))] * 2
    factors = dict(adapter_weights(model))
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    assert factors[name].equal(2.0 * layer.lora_B["default"].weight)


@pytest.fixture
def quantized(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "model")
    config = BitsAndBytesConfig(load_in_4bit=True)
    return Qwen3ForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)


def test_adapters_that_go_alone(caplog):
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    assert room(plain) == 0 and not caplog.messages
    with pytest.raises(ValueError, match="vllm_lora_transfer: .*, but the policy has none"):
        room(plain, "adapter")
    assert [room(lora(plain), setting) for setting in ("auto", "adapter")] == [8, 8]
    model = lora(Qwen3ForCausalLM(Qwen3Config(**SIZES)), rank_pattern={"q_proj": 9})
    assert room(model) == 16 and room(model, "merged") == 0 and not caplog.messages


class Alive(TorchDispatchMode):
    """Bytes of the tensors that were made inside and still exist; ``peak`` at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        new = isinstance(found, torch.Tensor) and not any(found is x for x in args)
        if new and found.device.type != "meta" and not func.is_view:
            size = found.numel() * found.element_size()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(found, self._gone, size)
        return found

    def _gone(self, size: int) -> None:
        self.now -= size


def size_of(tensors) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)


def drained(model) -> Alive:
    """Record what exists while an engine takes the weights one by one."""
    with Alive() as alive:
        for _ in policy_weights(model):
            pass
    return alive


def test_an_update_streams():
    """Never is there a second model in memory, whatever has to be merged or converted."""
    wide = SIZES | {"num_hidden_layers": 12}
    plain = Qwen3ForCausalLM(Qwen3Config(**wide))
    assert drained(plain).peak == 0
    layer = size_of(plain.model.layers[0].parameters())
    adapted = drained(lora(plain, target_modules="all-linear"))
    # of one linear layer: how it was, the merged one and what is added to it
    assert 0 < adapted.peak <= layer < size_of(plain.parameters()) / 8
    config = Qwen3MoeConfig(**wide, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    experts = Qwen3MoeForCausalLM(config)
    block = size_of(experts.model.layers[0].parameters())
    assert drained(experts).peak <= 2 * block < size_of(experts.parameters()) / 4


def test_an_update_through_files_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "_FILE_BYTES", 2000)
    transfer = FileTransfer(tmp_path, 5.0)
    own = {f"layer{i}": torch.randn(10, 25) for i in range(40)}  # 1000 bytes each
    server = SimpleNamespace(ask=lambda *args, **limits: None)
    with Alive() as alive:
        transfer.send(server, lambda: iter(own.items()), frozenset())
    # a file of them, and one more while it grows
    assert 2000 <= alive.peak <= 3000 and alive.now == 0
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 20
    sent = {name: value for file in files for name, value in load_file(file).items()}
    assert_same(sent, own)
