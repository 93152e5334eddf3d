"""Micro-batches without their padding: each row's hidden states, losses and gradients stay."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_kernels import LossConfig, linear_logprobs
from grpo_kernels.hf import add_fused_head
from grpo_trainer.data import Divisors, MicroBatch, Sample, collate
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.policy import RouterLoss, make_pack, policy_loss_of, target_logprobs
from grpo_trainer.policy.forward import run
from grpo_trainer.policy.packing import packed_rows
from tests.support import vision
from tests.support.tiny_models import SMALL
from tests.support.trainer import CannedEngine, lengths_reward, logged, parameters
from tests.trainer.checkpoint.features import experts

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0},
    "mistral": {"sliding_window": 4},
    "gemma3_text": SLIDING,
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4},
    "mixtral": {"num_local_experts": 4},
}
LENGTHS = (9, 2, 12, 1, 5, 6)  # longer and shorter than windows and chunks
WIDTH = max(LENGTHS) + 1


def tiny(family: str, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = SMALL | FAMILIES.get(family, {}) | {"initializer_range": 0.2} | changes
    config = CONFIG_MAPPING[family](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    add_fused_head(model)
    return model.eval()


def batch_of(lengths: tuple[int, ...] = LENGTHS) -> MicroBatch:
    """Return rows of random tokens, all but the first of each in the loss, with some padding."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 99, (n,), generator=draw).tolist() for n in lengths]
    samples = [Sample("", row[:1], None, row[1:]) for row in rows]
    advantages = torch.linspace(-1, 2, len(rows))
    count = torch.tensor(float(sum(lengths) - len(lengths)))
    return collate(
        samples, advantages, Divisors(count, count), pad_token_id=0, pad_to_multiple_of=WIDTH
    )


def packed(batch: MicroBatch, one_row: bool = False) -> MicroBatch:
    lengths = batch.attention_mask.sum(1).tolist()
    changed = packed_rows(lengths, batch.input_ids.shape[1], one_row)
    return MicroBatch(**vars(batch) | {"packed": changed})


def hidden_alone(model: PreTrainedModel, batch: MicroBatch) -> Tensor:  # (N, D)
    """Return hidden states of each row by itself, where no mask is needed."""
    lengths = batch.attention_mask.sum(1).tolist()
    rows = [ids[None, :n] for ids, n in zip(batch.input_ids, lengths, strict=True)]
    return torch.cat([model.model(input_ids=row).last_hidden_state[0] for row in rows])


def hidden_of(model: PreTrainedModel, batch: MicroBatch) -> Tensor:  # (N, D)
    kept: list[Tensor] = []

    def keep(hidden: Tensor, head: Any) -> Tensor:
        assert hidden.isfinite().all()
        kept.append(hidden[batch.attention_mask.bool()])
        return hidden[..., :1]

    run(model, batch, keep)
    return kept[0]


def loss_and_gradient(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    def head_fn(hidden: Tensor, head: Any) -> Tensor:
        found = linear_logprobs(hidden, head, batch.target, outputs=("logprobs",)).logprobs
        return (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum()

    loss = run(model, batch, head_fn).head
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat([x.flatten() for x in gradients])


@pytest.mark.parametrize("one_row", (False, True))
@pytest.mark.parametrize("multiple", (None, 8))
def test_every_element_has_one_place(one_row: bool, multiple: int | None) -> None:
    chance = random.Random(0)
    for _ in range(50):
        lengths = [chance.randint(1, 60) for _ in range(chance.randint(1, 12))]
        width = max(lengths) + chance.randint(0, 3)
        places = packed_rows(lengths, width, one_row, multiple)
        fill = len(lengths) * width
        kept = places[places < fill].tolist()
        wanted = [row * width + at for row, n in enumerate(lengths) for at in range(n)]
        assert sorted(kept) == wanted
        assert all(x % width == 0 or y == x - 1 for y, x in pairwise(kept))
        assert set(places[places >= fill].tolist()) <= {fill}
        if multiple is None:
            assert not one_row or places.shape == (1, sum(lengths))
            assert one_row or places.shape[0] * places.shape[1] ** 2 <= len(lengths) * width**2
        else:
            assert places.shape[1] % multiple == 0


@pytest.mark.parametrize("attention", ("eager", "sdpa", "flex_attention"))
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_each_row_alone(family: str, attention: str) -> None:
    if attention == "flex_attention" and family == "gpt2":
        pytest.skip("not in transformers")
    model, batch = tiny(family, attention), batch_of()
    # on a CPU flex attention is compiled to code that g++ refuses
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        alone = hidden_alone(model, batch) if family != "gpt2" else hidden_of(model, batch)
        for each in (packed(batch), packed(batch, one_row=True)):
            assert each.packed is not None and each.packed.numel() < batch.input_ids.numel()
            torch.testing.assert_close(hidden_of(model, each), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3", "gemma3_text"))
def test_gradients_are_those_of_padded_rows(
    family: str, attention: str, dtype: torch.dtype
) -> None:
    if dtype == torch.float64 and (family, attention) == ("gemma3_text", "eager"):
        pytest.skip("its mask at padding is NaN in fp64")
    model, batch = tiny(family, attention).to(dtype), batch_of()
    expected = loss_and_gradient(model, batch)
    found = loss_and_gradient(model, packed(batch))
    close = 1e-5 if dtype == torch.float32 else 1e-6  # rotary embeddings are fp32
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= close * y.norm()


def packed_by(pack: Any, batch: MicroBatch) -> MicroBatch:
    """Return the batch with the column of ``pack``; None packs nothing."""
    copy = MicroBatch(**vars(batch))
    if pack is not None:
        pack(copy, None)
    return copy


def flash_functions(*_: Any, **__: Any) -> Any:
    """Return what transformers takes from flash attention, in plain torch."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **_: Any) -> Tensor:
        ends = cu_seqlens_q.tolist()
        parts = []
        for first, last in pairwise(ends):
            one = [x[first:last].transpose(0, 1) for x in (q, k, v)]
            grouped = {"is_causal": True, "enable_gqa": True}
            attended = nn.functional.scaled_dot_product_attention(*one, **grouped)
            parts.append(attended.transpose(0, 1))
        return torch.cat(parts)

    def plain(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        rows = zip(q, k, v, strict=True)
        ends = torch.tensor([0, q.shape[1]])
        return torch.stack([varlen(*row, cu_seqlens_q=ends) for row in rows])

    module = modeling_flash_attention_utils
    return (plain, varlen, None, module._pad_input, module._unpad_input), (lambda **_: {}, None)


def test_flash_attention_takes_one_row(monkeypatch: pytest.MonkeyPatch, make_args: Any) -> None:
    path = "transformers.modeling_flash_attention_utils.lazy_import_flash_attention"
    monkeypatch.setattr(path, flash_functions)
    model, batch = tiny("qwen3"), batch_of()
    expected = loss_and_gradient(model, batch)
    model.config._attn_implementation = "flash_attention_2"
    pack = make_pack(make_args(packing="packed"), [(model, nullcontext(model))], images=False)
    batch = packed_by(pack, batch)
    assert batch.packed is not None and batch.packed.shape == (1, sum(LENGTHS))
    for x, y in zip(loss_and_gradient(model, batch), expected, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_losses_with_all_that_goes_with_a_token(make_args: Any) -> None:
    model, batch = tiny("llama"), batch_of()
    batch.old_logprobs = target_logprobs(model, batch, 0.7) + 0.1
    batch.ref_logprobs = batch.old_logprobs - 0.2
    found = target_logprobs(model, packed(batch), 0.7) + 0.1
    in_loss = batch.target >= 0
    torch.testing.assert_close(found[in_loss], batch.old_logprobs[in_loss])
    config = LossConfig(loss_type="grpo", beta=0.1, temperature=0.7)
    results = []
    for each in (batch, packed(batch)):
        loss, _ = policy_loss_of(model, each, each.token_batch(1), config, {})
        gradient = torch.autograd.grad(loss, [*model.parameters()])
        results.append([loss, *gradient])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_routers_count_tokens_and_no_filling() -> None:
    model, batch = tiny("mixtral"), batch_of()
    batch.target = batch.target.clone()
    results = []
    for each in (batch, packed(batch), packed(batch, one_row=True)):
        options = (each.token_batch(1), LossConfig(), {})
        _, metrics = policy_loss_of(model, each, *options, terms=[RouterLoss(1.0)])
        results.append(metrics["aux_loss"])
    assert packed(batch).packed.max() == batch.input_ids.numel()  # there is something to fill up
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=0)


BLOOM = {"n_embed": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4}
H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
# of small weights: the error is no larger than rounding
LFM2 = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "initializer_range": 0.02}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "state": (lambda: tiny("mamba", "eager", state_size=4), {}, "MambaForCausalLM, whose layers"),
    # too little for the rounding of bf16
    "some": (lambda: tiny("falcon_h1", **H1).bfloat16(), {}, "FalconH1ForCausalLM, whose layers"),
    "convolutions": (lambda: tiny("lfm2", **LFM2), {}, "Lfm2ForCausalLM, whose layers read across"),
    "in bf16": (lambda: tiny("lfm2", **LFM2).bfloat16(), {}, "Lfm2ForCausalLM, whose layers read"),
    "alibi": (
        lambda: tiny("bloom", "eager", **BLOOM), {},
        r"BloomForCausalLM, whose positions do not .* expected .* at most 1.0e-03, got [1-9]",
    ),
    # rows that see each other change less than rounding allows
    "small": (
        lambda: tiny("bloom", "eager", **BLOOM, initializer_range=0.02).bfloat16(), {},
        "BloomForCausalLM, whose positions",
    ),
    "sums": (lambda: tiny("opt", ffn_dim=48, word_embed_proj_dim=32), {}, "OPTFor.*, whose posi"),
    "noise": (lambda: tiny("llama"), {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha, whose"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_need_padding(case: str, make_args: Any, caplog: Any) -> None:
    make, changes, said = REFUSED[case]
    model = make()
    models = [(model, nullcontext(model))]
    with pytest.raises(ValueError, match=f"packing: expected 'auto' or 'padded' with {said}"):
        make_pack(make_args(packing="packed", **changes), models, images=False)
    pack = make_pack(make_args(**changes), models, images=False)
    assert packed_by(pack, batch_of()).packed is None
    [record] = [x for x in caplog.records if x.name.startswith("grpo_trainer")]
    assert record.getMessage().startswith("packing: rows are padded with ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_round_by_the_tokens_they_get(dtype: torch.dtype, make_args: Any) -> None:
    sizes = {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 64}
    model = tiny("qwen3_moe", **sizes).to(dtype)
    models = [(model, nullcontext(model))]
    pack = make_pack(make_args(packing="packed"), models, images=False)
    assert packed_by(pack, batch_of()).packed is not None


class NoPositions(nn.Module):
    """Runs a model that has no such argument."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, head_fn: Any) -> Any:
        return self.model(input_ids, attention_mask=attention_mask, head_fn=head_fn)


def test_what_fails_is_told(make_args: Any) -> None:
    model = tiny("llama")
    models = [(model, nullcontext(NoPositions(model)))]
    with pytest.raises(ValueError, match="LlamaForCausalLM, which fails .*TypeError.*position_ids"):
        make_pack(make_args(packing="packed"), models, images=False)


def test_models_of_two_kinds_of_attention(make_args: Any) -> None:
    models = [(model, nullcontext(model)) for model in (tiny("llama"), tiny("qwen3"))]
    models[1][0].config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM, whose attention \(flash_attention_2"):
        make_pack(make_args(packing="packed"), models, images=False)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_models_that_take_images(family: str, make_args: Any) -> None:
    model = vision.tiny_model(family)
    add_fused_head(model)
    models = [(model, nullcontext(model))]
    with pytest.raises(
        ValueError, match="packing: expected 'auto' or 'padded' with (images|.*positions)"
    ):
        make_pack(make_args(packing="packed"), models, images=True)
    pack = make_pack(make_args(), models, images=True)
    batch = batch_of()
    assert (packed_by(pack, batch).packed is None) == (
        family == "qwen2_5_vl"
    )  # positions in three dimensions
    batch.inputs = {"pixel_values": torch.zeros(1)}
    assert packed_by(pack, batch).packed is None


def test_auto_packs_where_that_saves(make_args: Any) -> None:
    model = tiny("llama")
    models = [(model, nullcontext(model))]
    alike, full = batch_of((WIDTH,) * 3), batch_of()
    for packing, expected in {"auto": (True, False), "packed": (True, True)}.items():
        pack = make_pack(make_args(packing=packing), models, images=False)
        packed_ones = [packed_by(pack, batch).packed is not None for batch in (full, alike)]
        assert tuple(packed_ones) == expected
    assert make_pack(make_args(packing="padded"), models, images=False) is None


CHANGES: dict[str, Any] = {
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "reference": {"beta": 0.1, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "multiple": {"pad_to_multiple_of": 8},
    "routers": experts,
}


@pytest.mark.parametrize("case", CHANGES)
def test_training_is_that_of_padded_rows(case: str, make_trainer: Any) -> None:
    runs: list[Any] = []
    widths: dict[str, set[tuple[int, int]]] = {"padded": set(), "packed": set()}
    rows = Dataset.from_list([{"prompt": f"{'37' * (i % 2 * 6)}{i}="} for i in range(8)])
    for packing in widths:
        changes = CHANGES[case]() if callable(CHANGES[case]) else CHANGES[case]
        changes = {"model": make_policy(make_tokenizer(), seed=0)} | changes
        trainer = make_trainer(
            lengths_reward, engine=CannedEngine(), packing=packing, train_dataset=rows,
            shuffle_dataset=False, per_device_train_batch_size=8, optim="sgd", **changes,
        )  # fmt: skip
        shapes = widths[packing]
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda module, args, output, shapes=shapes: shapes.add(tuple(args[0].shape))
        )
        trainer.train()
        runs.append((logged(trainer), parameters(trainer.model)))
    (padded_log, padded), (packed_log, found) = runs
    assert all(rows == 8 for rows, _ in widths["padded"])
    assert any(rows < 8 for rows, _ in widths["packed"])
    torch.testing.assert_close(found, padded, rtol=1e-4, atol=1e-6)
    for x, y in zip(packed_log, padded_log, strict=True):
        for name in ("micro_batches/shared_tokens", "frac_rows_skipped"):  # of how rows are dealt
            x.pop(name, None)
            y.pop(name, None)
        assert x == pytest.approx(y, rel=1e-3, abs=1e-5)
