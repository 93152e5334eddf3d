"""Micro-batches without their padding: the losses and gradients of each row stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
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
from grpo_trainer.policy import RouterLoss, make_pack, policy_loss_of
from grpo_trainer.policy.forward import run
from grpo_trainer.policy.packing import packed_rows
from tests.support import vision
from tests.support.tiny_models import SMALL
from tests.support.trainer import CannedEngine, lengths_reward, logged, parameters
from tests.trainer.features import mixture
from tests.trainer.features import policy as fresh_policy

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
    return collated(rows, prompt=1, pad_to_multiple_of=WIDTH)


def collated(rows: list[list[int]], prompt: int = 4, **options: Any) -> MicroBatch:
    """Return rows whose first ``prompt`` tokens, or fewer, are not in the loss."""
    prompts = [max(1, min(prompt, len(row) - 1)) for row in rows]
    samples = [
        Sample("", row[:start], None, row[start:]) for row, start in zip(rows, prompts, strict=True)
    ]
    count = torch.tensor(float(sum(len(one.completion_ids) for one in samples)))
    advantages = torch.linspace(-1, 2, len(rows))
    return collate(samples, advantages, Divisors(count, count), pad_token_id=0, **options)


def packed(batch: MicroBatch, one_row: bool = False) -> MicroBatch:
    lengths = batch.attention_mask.sum(1).tolist()
    return replace(batch, packed=packed_rows(lengths, batch.input_ids.shape[1], one_row))


def tokens(count: int) -> list[int]:
    return torch.randint(3, 99, (count,)).tolist()


def groups(prompts: tuple[int, ...] = (7, 7, 3, 7, 3, 5), longest: int = 6) -> MicroBatch:
    """Return rows whose prompts are the same where they are of a length."""
    torch.manual_seed(2)
    ids = tokens(64)
    return collated([ids[n : 2 * n] + tokens(1 + row % longest) for row, n in enumerate(prompts)])


def turns() -> MicroBatch:
    """Return rows of two prompts: turns in common, branches of branches, a row twice, one that
    another begins with, and one with nothing in common."""
    torch.manual_seed(3)
    prompt, first, second = tokens(9), tokens(5), tokens(6)
    once, twice = prompt + first, prompt + first + second
    rows = [twice + tokens(3), once + tokens(2), twice + tokens(4), prompt + tokens(7)]
    return collated([*rows, twice, twice, tokens(12), prompt[:5] + tokens(5)])


# rows, and how many of their tokens others stand for
BATCHES: dict[str, tuple[Callable[[], MicroBatch], int]] = {
    "rows": (batch_of, 0),
    "a prompt": (groups, 2 * 7 + 3),
    "turns": (turns, 3 * 20 + 14 + 9 + 5),
    "one row twice": (lambda: collated([[*range(3, 12)]] * 2), 9),
}


class Loss:
    """A weighted sum of log-probabilities of each row, and its gradient."""

    def __init__(self, model: PreTrainedModel, batch: MicroBatch) -> None:
        self._model, self._batch = model, batch
        self._weights = torch.linspace(-1, 1, batch.target.numel()).view_as(batch.target)

    def of_rows_alone(self) -> tuple[Tensor, ...]:
        """Run each row by itself, where no mask is needed."""
        batch = self._batch
        parts = zip(
            batch.input_ids, batch.target, self._weights, batch.attention_mask.sum(1).tolist(),
            strict=True,
        )  # fmt: skip
        rows = [
            self._model(
                input_ids=ids[None, :n], head_fn=partial(self._sum, target[None, :n], weight[:n])
            )
            for ids, target, weight, n in parts
        ]
        return self._with_gradient(torch.stack([row.head for row in rows]).sum())

    def of(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        return self._with_gradient(
            run(self._model, batch, partial(self._sum, batch.target, self._weights)).head
        )

    @staticmethod
    def _sum(target: Tensor, weights: Tensor, hidden: Tensor, head: Any) -> Tensor:
        assert hidden.isfinite().all()
        logprobs = linear_logprobs(hidden, head, target, outputs=("logprobs",)).logprobs
        return (logprobs * weights).sum()

    def _with_gradient(self, loss: Tensor) -> tuple[Tensor, ...]:
        if not loss.requires_grad:
            return (loss,)
        parameters = [*self._model.parameters()]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), torch.cat([x.flatten() for x in gradients])


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor], error: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= error * y.norm()


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


# in fp64, too, most families round to fp32: in their norms and positions
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 3e-2}
RUNS = [
    *product(FAMILIES, ("eager", "sdpa", "flex_attention"), [torch.float32]),
    *product(("llama", "gpt2"), ["sdpa"], [torch.float64]),
    ("llama", "sdpa", torch.bfloat16),
]
RUNS.remove(("gpt2", "flex_attention", torch.float32))  # not in transformers


@pytest.mark.usefixtures("uncompiled")  # on a CPU g++ refuses the code of flex attention
@pytest.mark.parametrize(("family", "attention", "dtype"), RUNS)
def test_packed_rows_are_rows_alone(
    family: str, attention: str, dtype: torch.dtype, make_args: Any
) -> None:
    """What rows have in common is computed once; losses and gradients stay."""
    model = tiny(family, attention).to(dtype)
    if attention == "flex_attention":  # it has no backward on a CPU
        model.requires_grad_(False)
    pack = make_pack(make_args(packing="packed"), [(model, nullcontext(model))], images=False)
    close = 1e-12 if (family, dtype) == ("gpt2", torch.float64) else CLOSE[dtype]
    computed: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: computed.append(args[0].numel())
    )
    for make, in_common in BATCHES.values():
        batch = make()
        shared, losses = packed_by(pack, batch), Loss(model, batch)
        expected = losses.of_rows_alone()
        for each in (packed(batch), packed(batch, one_row=True), shared):
            computed.clear()
            assert_close(losses.of(each), expected, close)
            assert computed == [each.packed.numel()]
        kept = shared.packed < batch.input_ids.numel()
        assert kept.sum() == batch.attention_mask.sum() - (in_common if pack.shares else 0)


def packed_by(pack: Any, batch: MicroBatch) -> MicroBatch:
    """Return the batch with the column of ``pack``; None packs nothing."""
    copy = replace(batch)
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
    losses = Loss(model, batch)
    expected = losses.of_rows_alone()
    model.config._attn_implementation = "flash_attention_2"
    pack = make_pack(make_args(packing="packed"), [(model, nullcontext(model))], images=False)
    batch = packed_by(pack, batch)
    assert batch.packed is not None and batch.packed.shape == (1, sum(LENGTHS))
    assert_close(losses.of(batch), expected, 1e-5)


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
    "state": (lambda: tiny("mamba", "eager", state_size=4), {}, "MambaForCausalLM, because"),
    # too little for the rounding of bf16
    "some": (lambda: tiny("falcon_h1", **H1).bfloat16(), {}, "FalconH1ForCausalLM, because its"),
    "convolutions": (lambda: tiny("lfm2", **LFM2), {}, "Lfm2ForCausalLM, because layers"),
    "in bf16": (lambda: tiny("lfm2", **LFM2).bfloat16(), {}, "Lfm2ForCausalLM, because layers oth"),
    "alibi": (
        lambda: tiny("bloom", "eager", **BLOOM), {},
        r"BloomForCausalLM, because its positions do not .* expected .* at most 1.0e-03, got [1-9]",
    ),
    # rows that see each other change less than rounding allows
    "small": (
        lambda: tiny("bloom", "eager", **BLOOM, initializer_range=0.02).bfloat16(), {},
        "BloomForCausalLM, because its positions",
    ),
    "sums": (lambda: tiny("opt", ffn_dim=48, word_embed_proj_dim=32), {}, "OPTFor.*, because"),
    "noise": (lambda: tiny("llama"), {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha, beca"),
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
    assert record.getMessage().startswith("packing: rows are padded because of ")


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
    with pytest.raises(
        ValueError, match=r"Qwen3ForCausalLM, because its attention \(flash_attention_2"
    ):
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
    "policies": {
        "num_iterations": 2, "max_steps": 4, "beta": 0.1, "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    "routers": {"model": mixture, "pad_to_multiple_of": 8},
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_training_is_that_of_padded_rows(case: str, make_trainer: Any) -> None:
    runs: list[Any] = []
    widths: dict[str, set[tuple[int, int]]] = {"padded": set(), "packed": set()}
    rows = Dataset.from_list([{"prompt": f"{'37' * (i % 2 * 6)}{i}="} for i in range(8)])
    for packing in widths:
        changes = {"model": fresh_policy} | CHANGES[case]
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
