"""Liger's loss module and ours in its place give the same loss, gradients and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.integrations import liger
from tests.hf.test_families import tiny_model
from tests.integrations.precision import assert_results_as_exact_as

theirs = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss
B, T, D, V = 3, 7, 8, 61
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"beta": 0.0, "epsilon_high": 0.3, "temperature": 0.7},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.02},
    "bnpo": {"delta": 1.3, "use_bias_correction_kl": True},
    "dr_grpo": {"max_completion_length": 9},
    "luspo": {"importance_sampling_level": "sequence", "beta": 0.0},
    "cispo": {"epsilon_high": 1.1},
    "sapo": {"sapo_temperature_pos": 2.0},
    "vespo": {"vespo_k_neg": 2.5},
}


def make_inputs(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    hidden, weight, bias = normal(B, T, D), normal(V, D), normal(V)
    ids = torch.randint(0, V, (B, T), generator=g)
    logits = (hidden @ weight.T + bias).log_softmax(-1)
    own = logits.gather(-1, ids[..., None]).squeeze(-1)
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[0, 4:] = mask[2, 6:] = 0
    return {
        "_input": hidden,
        "lin_weight": weight,
        "selected_token_ids": ids,
        "attention_mask": mask,
        "advantages": normal(B),
        "bias": bias,
        "ref_per_token_logps": own + 0.2 * normal(B, T),
        "old_per_token_logps": own + 0.2 * normal(B, T),
    }


def run(module: Any, inputs: dict[str, Tensor], **more: Any) -> tuple[Any, Any, Any]:
    inputs = dict(inputs)
    names = ("_input", "lin_weight", "bias")
    leaves = [inputs[name].clone().requires_grad_() for name in names]
    inputs |= dict(zip(names, leaves, strict=True))
    loss, metrics = module(**inputs, **more)
    return loss.detach(), torch.autograd.grad(loss, leaves), tuple(metrics)


def assert_alike(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def assert_parity(settings: dict[str, Any], inputs: Any, tolerance: float = 2e-5) -> None:
    settings = {"compiled": False, **settings}
    found, expected = (
        run(module(**settings), inputs) for module in (liger.LigerFusedLinearGRPOLoss, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ratio", [None, (B,), (B, 1), (B, T)], ids=str)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_parity(name: str, ratio: tuple[int, ...] | None) -> None:
    if name == "luspo" and ratio == (B, T):
        pytest.skip("Liger's then counts padding")
    inputs: dict[str, Any] = make_inputs()
    if ratio is not None:
        inputs["vllm_is_ratio"] = torch.rand(*ratio) + 0.5
        inputs["num_items_in_batch"] = torch.tensor(31.0)
    if ratio == (B, T):
        inputs["vllm_is_ratio"][1, 2] = 0  # masked by the host
        inputs["vllm_is_ratio"][inputs["attention_mask"] == 0] = 1  # their vespo sums these as well
    assert_parity({"loss_type": name, **CASES[name]}, inputs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_in_bf16(name: str) -> None:
    settings = {"compiled": False, "loss_type": name, **CASES[name]}
    rounded = make_inputs()
    names = ("_input", "lin_weight", "bias")
    rounded |= {name: rounded[name].bfloat16() for name in names}
    exact = rounded | {name: rounded[name].float() for name in names}
    found = run(liger.LigerFusedLinearGRPOLoss(**settings), rounded)[:2]
    own, wide = (run(theirs(**settings), x)[:2] for x in (rounded, exact))
    assert_results_as_exact_as(found, own, wide)


# all ratios are 1: others may be clipped in theirs alone, which round logits
_BF16 = {"_input": torch.bfloat16, "advantages": torch.bfloat16, "old_per_token_logps": None}
# what becomes of the inputs: a dtype that they are cast to, or other values
CHANGES: dict[str, dict[str, Any]] = {
    "integers": {"advantages": torch.tensor([2, -1, 0]), "vllm_is_ratio": torch.full((B, 1), 2)},
    "int32 ids": {"selected_token_ids": torch.int32, "attention_mask": torch.int32},
    "bool mask": {"attention_mask": torch.bool},
    "mask in floats": {"attention_mask": torch.float32},
    "a sequence without tokens": {"attention_mask": torch.tensor([[1], [0], [1]]).expand(B, T)},
    "no tokens": {"attention_mask": torch.zeros(B, T), "vllm_is_ratio": torch.full((B,), 0.7)},
    "bf16": _BF16 | {"lin_weight": torch.bfloat16, "bias": torch.bfloat16},
    "fp32 head": _BF16,
    "bf16 head": {"lin_weight": torch.bfloat16},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_what_inputs_may_be(name: str, change: str) -> None:
    inputs: dict[str, Any] = make_inputs()
    for key, value in CHANGES[change].items():
        inputs[key] = inputs[key].to(value) if isinstance(value, torch.dtype) else value
    tolerance = 5e-2 if torch.bfloat16 in CHANGES[change].values() else 2e-5
    assert_parity({"loss_type": name, **CASES[name]}, inputs, tolerance)


@pytest.mark.parametrize("given", ["ref_per_token_logps", "ref_input", None])
@pytest.mark.parametrize("use_ref_model", [True, False])
@pytest.mark.parametrize("settings", [{}, {"use_bias_correction_kl": True}, {"loss_type": "sapo"}])
def test_references(settings: dict[str, Any], use_ref_model: bool, given: str | None) -> None:
    if use_ref_model and given is None:
        pytest.skip("an error, theirs and ours")
    inputs, other = make_inputs(), make_inputs(1)
    if given != "ref_per_token_logps":
        del inputs["ref_per_token_logps"]
    if given == "ref_input":
        inputs |= {"ref_input": other["_input"], "ref_weight": other["lin_weight"]}
        inputs |= {"ref_bias": other["bias"]}
    assert_parity({"use_ref_model": use_ref_model, "temperature": 0.9, **settings}, inputs)


def test_flat_hidden_states_and_none_for_what_is_optional() -> None:
    inputs = make_inputs()
    settings = {"compiled": False, "beta": 0.0, "use_ref_model": False}
    for name in ("ref_per_token_logps", "old_per_token_logps"):
        del inputs[name]
    expected = run(theirs(**settings), inputs)
    module = liger.LigerFusedLinearGRPOLoss(**settings)
    assert_alike(run(module, inputs), expected)
    flat = inputs | {"_input": inputs["_input"].reshape(-1, D)}
    loss, gradients, metrics = run(module, flat)
    gradients = (gradients[0].reshape(B, T, D), *gradients[1:])
    assert_alike((loss, gradients, metrics), expected)


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_without_padding_and_advantages_per_token(loss_type: str) -> None:
    inputs = make_inputs()
    module = liger.LigerFusedLinearGRPOLoss(loss_type=loss_type)
    ratio = {"vllm_is_ratio": torch.rand(B) + 0.5}
    loss, _, metrics = run(module, inputs, **ratio)
    kept = inputs["attention_mask"] == 1
    names = ("_input", "selected_token_ids", "ref_per_token_logps", "old_per_token_logps")
    packed = inputs | {name: inputs[name][kept] for name in names} | {"attention_mask": None}
    packed["cu_seqlens"] = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    again = run(module, packed, **ratio)
    assert_alike((again[0], again[2]), (loss, metrics))
    per_token = inputs | {"advantages": inputs["advantages"][:, None].expand(B, T)}
    again = run(module, per_token, **ratio)
    assert_alike((again[0], again[2]), (loss, metrics))


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="loss_type: expected one of"):
        liger.LigerFusedLinearGRPOLoss(loss_type="ppo")
    with pytest.raises(ValueError, match="delta: expected None for loss_type 'sapo', got 2.0"):
        liger.LigerFusedLinearGRPOLoss(loss_type="sapo", delta=2.0)
    inputs, module = make_inputs(), liger.LigerFusedLinearGRPOLoss()
    for change, message in (
        ({"ref_per_token_logps": None}, "ref_logprobs: expected the reference's"),
        ({"attention_mask": inputs["attention_mask"] / 2}, "mask: expected bool or 0 and 1"),
        ({"advantages": torch.ones(B + 1)}, r"advantages: expected shape \(3,\) .* got \(4,\)"),
        ({"vllm_is_ratio": torch.ones(T)}, r"vllm_is_ratio: expected shape \(3,\) .* got \(7,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            module(**(inputs | change))


@pytest.mark.parametrize("loss_type", CASES)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_with_the_settings_of_theirs(loss_type: str) -> None:
    settings = {"loss_type": loss_type, "compiled": False, "beta": 0.2, **CASES[loss_type]}
    model = tiny_model("qwen2")
    made = liger.instead_of(theirs(**settings), model)
    assert liger.instead_of(made, model) is made
    plain = liger.LigerFusedLinearGRPOLoss(**settings)
    assert (made.config, made.use_ref_model) == (plain.config, plain.use_ref_model)


@pytest.mark.parametrize("family, what", [("gemma2", "softcap 5.0"), ("cohere", "scale 0.25")])
def test_heads_that_the_module_is_not_told_of(family: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"model: expected logits without .* {what}"):
        liger.instead_of(theirs(), tiny_model(family))


def test_an_adapter_that_the_module_is_not_told_of() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="model: expected lm_head without an adapter"):
        liger.instead_of(theirs(), model)


def test_in_its_place() -> None:
    package = pytest.importorskip("liger_kernel.chunked_loss")
    with liger.enabled():
        assert package.LigerFusedLinearGRPOLoss is liger.LigerFusedLinearGRPOLoss
        assert package.grpo_loss.LigerFusedLinearGRPOLoss is liger.LigerFusedLinearGRPOLoss
    assert package.LigerFusedLinearGRPOLoss is theirs
    assert liger.LigerFusedLinearGRPOLoss is not theirs


def test_too_late() -> None:
    module = theirs(compiled=False)
    with pytest.raises(ValueError, match="expected no LigerFusedLinearGRPOLoss of Liger's yet"):
        liger.enable()
    assert not liger.SWITCH.on
    del module
    liger.enable()
    liger.enable()  # again, without effect
    liger.disable()
