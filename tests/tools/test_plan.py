"""``grpo-kernels plan``: what it says is what a step allocates, and what it shows adds up.

Real heads and GPUs are measured in ``benchmarks/test_plan.py``.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    ViTConfig,
)

from grpo_kernels import (
    Bounded,
    LossConfig,
    TokenBatch,
    available_backends,
    explain,
    linear_divergence,
    linear_policy_loss,
)
from grpo_kernels.engine import RunOptions
from grpo_kernels.head import matmul
from grpo_kernels.tools import cli, estimate
from grpo_kernels.tools.call import Call
from grpo_kernels.tools.estimate import growth, total
from grpo_kernels.tools.gpus import find_gpu
from tests.tools.test_cli import error

D, V = 64, 5000
SIZES = ["--hidden", "64", "--vocab", "1000"]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, None), (BF16, None), (FP16, None), (BF16, FP32)]  # of the states, of the weight


def plan(capsys, *arguments: str) -> str:
    assert cli.main(["plan", "--tokens", "100", *arguments]) == 0
    return capsys.readouterr().out


def plan_data(capsys, *arguments: str) -> dict:
    return json.loads(plan(capsys, *arguments, "--json"))


class LiveBytes(TorchDispatchMode):
    """The peak of the bytes in storages that operations return, over those of the inputs."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self._now = self.growth = 0
        for x in inputs:
            self._add(x)
        self._now = self.growth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def forget(_: object) -> None:
            self._now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self._now += size
        self.growth = max(self.growth, self._now)


def call_of(name: str, tokens: int, options: dict[str, Any], **head: Any) -> Call:
    sizes = {"hidden": D, "vocabulary": V, "tokens": tokens} | head
    return Call(name=name, **sizes, device="cpu", options=RunOptions(**options))


def allocated(call: Call, scale: float = 0.1, **options: Any) -> int:
    """Run a call, whose softmax is nearly flat at a small scale of the weight."""
    name, tokens, dtype = call.name, call.tokens, call.dtype
    depth, columns = call.hidden, call.vocabulary
    hidden = torch.randn(1, tokens, depth, dtype=dtype)
    hidden[:, 0] *= 1000  # a certain token, or a sparse backward would have no entries
    hidden.requires_grad_()
    weight = torch.randn(columns, depth, dtype=call.weight_dtype or dtype).mul_(scale)
    weight.requires_grad_(not call.frozen)
    target = torch.randint(0, columns, (1, tokens))
    batch, mixed = TokenBatch.from_padded(target, torch.ones(1)), call.weight_dtype is not None
    autocast = torch.autocast("cpu", dtype) if mixed else contextlib.nullcontext()
    with LiveBytes(hidden, weight) as live, autocast:
        if name == "eager":
            scores = functional.linear(hidden, weight).log_softmax(-1, dtype=FP32)
            loss = scores.gather(-1, target[..., None]).sum()
            del scores
        else:
            config = LossConfig(loss_type="dapo")
            loss = linear_policy_loss(hidden, weight, batch, config, schedule=name, **options).loss
        loss.backward()
    return live.growth


@pytest.fixture
def without_what_libraries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no more than a call takes itself; other backends than the native one take more."""
    if "cpu" not in available_backends():
        pytest.skip("other backends take more on a CPU")
    monkeypatch.setattr(estimate, "_copies", lambda call, elements: 0)
    monkeypatch.setattr(estimate, "_sorted_entries", lambda call, kept: 0)
    # 4 MiB of sums, where oneDNN has no GEMM
    monkeypatch.setattr(matmul, "_torch_is_slow", lambda dtype: False)


@pytest.mark.usefixtures("without_what_libraries_take")
@pytest.mark.parametrize(
    "name,options",
    [
        ("eager", {}),
        ("one_pass", {}),
        ("one_pass", {"precision": "input"}),
        ("two_pass", {"activation_bytes": 0}),
        ("two_pass", {}),
        ("two_pass", {"activation_bytes": 1 << 30}),
        ("two_pass", {"activation_bytes": 1 << 30, "precision": "input"}),
    ],
)
@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("dtype,weight_dtype", DTYPES)
def test_a_step_allocates_what_is_said(name, options, frozen, dtype, weight_dtype) -> None:
    """In one tile and in several; beside what a library takes for its GEMMs."""
    head = {"dtype": dtype, "weight_dtype": weight_dtype, "frozen": frozen}
    for tokens, size in ((100, None), (600, 6 << 20)):
        tiled = options if name == "eager" else options | {"max_workspace_bytes": size}
        call = call_of(name, tokens, tiled, **head)
        assert growth(call) == pytest.approx(allocated(call, **tiled), rel=0.01)


@pytest.mark.usefixtures("without_what_libraries_take")
@pytest.mark.parametrize("vocabulary", (262_144, 262_145))
@pytest.mark.parametrize("name,dtype", [("one_pass", FP32), ("two_pass", FP32), ("two_pass", BF16)])
def test_a_step_with_a_large_vocabulary_allocates_what_is_said(name, dtype, vocabulary) -> None:
    for tokens in (1, 200):  # in one tile and in two
        call = call_of(name, tokens, {}, hidden=32, vocabulary=vocabulary, dtype=dtype)
        assert growth(call) == pytest.approx(allocated(call), rel=0.01), tokens


@pytest.mark.usefixtures("without_what_libraries_take")
@pytest.mark.parametrize("name", ("one_pass", "two_pass"))
@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("dtype,weight_dtype", DTYPES)
def test_a_bounded_step_allocates_what_is_said(name, frozen, exact, dtype, weight_dtype) -> None:
    """Of flat rows, which need more entries than they may have; of others at most that."""
    dtypes = {"dtype": dtype, "weight_dtype": weight_dtype, "frozen": frozen}
    small, wide = {"vocabulary": 2000}, {"hidden": 224, "vocabulary": 6250}
    for tokens, slots, size, head in (
        (128, 128, 3 << 20, wide),  # whose weight takes the most
        (128, 32, 1 << 20, wide),
        (700, 256, None, small),
        (700, 256, 2 << 20, small),
    ):
        bounded = Bounded(slots=slots, exact_weight=exact)
        options = {"max_workspace_bytes": size, "backward": bounded}
        call = call_of(name, tokens, options, **dtypes, **head)
        assert growth(call) == pytest.approx(allocated(call, **options), rel=0.02)
        assert allocated(call, scale=2, **options) <= 1.02 * growth(call)


@pytest.mark.usefixtures("without_what_libraries_take")
@pytest.mark.parametrize("dtype", (FP32, BF16, FP16))
@pytest.mark.parametrize("frozen", (False, True))
def test_a_divergence_allocates_about_what_is_said(frozen, dtype) -> None:
    """In one tile exactly; in several, the last of which is smaller, a little less."""
    for tokens, size, off in ((300, None, 0.02), (600, 3 << 20, 0.15)):
        options = {"max_workspace_bytes": size}
        call = call_of("one_pass", tokens, options, dtype=dtype, frozen=frozen, teacher=48)
        hidden = torch.randn(tokens, D, dtype=dtype).requires_grad_()
        weight = torch.randn(V, D, dtype=dtype).mul_(0.1).requires_grad_(not frozen)
        teacher = torch.randn(tokens, 48, dtype=dtype), torch.randn(V, 48, dtype=dtype)
        with LiveBytes(hidden, weight, *teacher) as live:
            linear_divergence(hidden, weight, *teacher, **options).loss.backward()
        assert live.growth <= 1.02 * growth(call)
        assert growth(call) == pytest.approx(live.growth, rel=off)


def test_the_default_is_what_a_step_takes() -> None:
    seen, columns = set(), 8 * V
    for tokens, frozen, dtype in ((64, False, FP32), (4096, False, BF16), (4096, True, BF16)):
        batch = TokenBatch.from_padded(torch.zeros(1, tokens, dtype=torch.int64), torch.ones(1))
        head = {"hidden": 2, "vocabulary": columns, "dtype": dtype, "frozen": frozen}
        hidden = torch.zeros(1, tokens, 2, dtype=dtype, requires_grad=True)
        weight = torch.zeros(columns, 2, dtype=dtype, requires_grad=not frozen)
        plan = explain(hidden, weight, batch, LossConfig(loss_type="dapo"))
        call = Call(name="two_pass", **head, tokens=tokens, device="cpu")
        assert call.default == plan.schedule
        seen.add(plan.schedule)
    assert seen == {"one_pass", "two_pass"}


# hidden size and vocabulary of Qwen 3 1.7B, Llama 3 8B, Gemma 3 4B
@pytest.mark.parametrize("hidden,vocabulary", [(2048, 151936), (4096, 128256), (2560, 262144)])
@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.usefixtures("without_what_libraries_take")
def test_the_default_takes_about_the_memory_of_a_chunked_head_or_less(
    device, hidden, vocabulary
) -> None:
    for dtype, frozen in ((FP32, False), (BF16, False), (FP16, True)):
        head = {"hidden": hidden, "vocabulary": vocabulary, "dtype": dtype, "frozen": frozen}
        before = 0
        for tokens in (4096, 5000, 16384, 1 << 20):
            trl = Call(name="trl", **head, tokens=tokens, device=device)
            ours = total(replace(trl, name=trl.default))
            assert before < ours < total(trl)
            before = ours


def test_a_plan_adds_up(capsys) -> None:
    options = (*SIZES, "--tflops", "100", "--gpu-memory", "1GiB", "--dtype", "fp32")
    lines = plan_data(capsys, *options)["implementations"]
    names = [line["implementation"] for line in lines]
    assert names == ["eager", "trl", "one_pass", "two_pass"]
    for number, line in enumerate(lines):
        parts = [line[f"{part}_bytes"] for part in ("inputs", "returned", "extra")]
        assert sum(parts) == line["total_bytes"]
        assert line["seconds"] == pytest.approx(line["gemms"] * 2 * 100 * 64 * 1000 / 100e12)
        most = line["largest_micro_batch_tokens"]
        fits, more = (
            plan_data(capsys, *options, "--tokens", str(n))["implementations"][number]
            for n in (most, most + 1)
        )
        assert fits["total_bytes"] <= 1 << 30 < more["total_bytes"]


@pytest.mark.parametrize(
    ("options", "gemms"),
    [
        ("", [3, 4, 3, 4, 3]),
        ("--frozen-head --activation-bytes 0", [2, 3, 2, 3]),
        ("--activation-bytes 1MiB", [3, 4, 3, 3, 3]),
        ("--bounded", [3, 4, 3, 4, 3, 2, 3, 1, 1]),
        ("--teacher 32", [3, 4, 3, 4, 3, 4]),
    ],
)
def test_time_is_that_of_the_gemms(capsys, options, gemms) -> None:
    lines = plan_data(capsys, *SIZES, *options.split())["implementations"]
    assert [line["gemms"] for line in lines] == gemms


def test_a_plan_of_one_rank(capsys) -> None:
    options = (*SIZES, "--shard", "tp=8", "--gpu-memory", "1GiB")
    data, alone = plan_data(capsys, *options), plan_data(capsys, *SIZES, "--gpu-memory", "1GiB")
    sent = [100 * 32 * 7, 2 * (100 * 64 * 4 * 7 // 8)]
    assert list(data["shard"]["sent_bytes"].values()) == sent
    others = {(line["title"], line["implementation"]): line for line in alone["implementations"]}
    for line in data["implementations"]:
        parts = [line[f"{part}_bytes"] for part in ("inputs", "returned", "extra")]
        assert line["total_bytes"] == sum(parts)
        assert line["total_bytes"] < others[line["title"], line["implementation"]]["total_bytes"]


def test_a_plan_is_of_the_rank_with_the_most_ids(capsys) -> None:
    uneven, even = (
        plan_data(capsys, "--hidden", "64", "--vocab", vocabulary, "--shard", "tp=8")
        for vocabulary in ("1001", "1008")
    )
    for one, other in zip(uneven["implementations"], even["implementations"], strict=True):
        assert one["inputs_bytes"] == other["inputs_bytes"]


def most_of_default(data: dict) -> int:
    lines = [x for x in data["implementations"] if x["implementation"] == data["default"]]
    return lines[0]["largest_micro_batch_tokens"]


def test_reserved_memory(capsys) -> None:
    everything = plan_data(capsys, *SIZES, "--gpu-memory", "1GiB")["implementations"]
    less = plan_data(capsys, *SIZES, "--gpu-memory", "1GiB", "--reserved", "512MiB")
    for line, half in zip(everything, less["implementations"], strict=True):
        assert 0 < half["largest_micro_batch_tokens"] < line["largest_micro_batch_tokens"]
    said = plan(capsys, *SIZES, "--gpu-memory", "1GiB", "--reserved", "512MiB")
    assert said.endswith("\nfits       100 tokens, if --reserved includes their activations\n")
    assert re.search(r"^ours, one_pass .* fits$", said, re.M) and "max_tokens" not in said
    many = (*SIZES, "--gpu-memory", "1GiB", "--tokens", "100000000")
    most = most_of_default(plan_data(capsys, *many))
    trainer = f"max_tokens_per_micro_batch = {most}, if --reserved includes their "
    trainer += "activations; 100,000,000 tokens do not fit\n"
    assert trainer in plan(capsys, *many)
    none = plan(capsys, *SIZES, "--gpu-memory", "1GiB", "--reserved", "1GiB")
    assert "not one token" in none and "max_tokens" not in none and "fits " not in none
    plan(capsys, "--hidden", "1", "--vocab", "2", "--gpu-memory", "16TiB")  # is found at once


@pytest.mark.parametrize("driver,name", [
    ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA GH200 480GB", "H200"), ("NVIDIA H100 PCIe", None), ("H1000", None), ("XH100", None),
])  # fmt: skip
def test_gpus_are_found_by_their_names(driver, name) -> None:
    row = find_gpu(driver)
    assert (row and row[0]) == name


def save(config, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_heads_of_models(capsys, tmp_path) -> None:
    plain = Qwen2Config(hidden_size=64, vocab_size=1000, dtype="float16")
    folder = save(plain, tmp_path / "policy")
    expected = {
        "hidden": 64, "vocabulary": 1000, "dtype": "float16", "weight_dtype": "float16",
        "frozen": False, "softcap": False,
    }  # fmt: skip
    for model in (folder, f"{folder}/config.json"):
        assert plan_data(capsys, "--model", model)["head"] == expected
    text = Gemma3TextConfig(hidden_size=48, vocab_size=700)
    folder = save(Gemma3Config(text_config=text, dtype="bfloat16"), tmp_path / "images")
    head = plan_data(capsys, "--model", folder, "--weight-dtype", "fp32")["head"]
    assert (head["hidden"], head["vocabulary"]) == (48, 700)
    assert (head["dtype"], head["weight_dtype"]) == ("bfloat16", "float32")
    folder = save(Gemma2Config(hidden_size=48, vocab_size=700), tmp_path / "capped")
    assert plan_data(capsys, "--model", folder)["head"]["softcap"]


def test_the_body_of_a_dense_model_counts(capsys, tmp_path) -> None:
    """As the tables of docs/guides/limited-vram.md do: ``test_vram.py``."""
    sizes = {"hidden_size": 64, "vocab_size": 1000, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    memory = ("--gpu-memory", "1GiB", "--dtype", "bf16")
    dense = ("--model", save(Qwen2Config(**sizes), tmp_path / "dense"), *memory)
    for options, state, inside in (
        ((), 2, (32, 16, 12)),
        (("--weight-dtype", "fp32"), 4, (32, 16, 12)),
        (("--frozen-head",), 2, (48, 20, 24)),
    ):
        data = plan_data(capsys, *dense, *options)
        per_token = (3 + 4) * 64 * state + 64 * inside[0] + 64 * inside[1] + 96 * inside[2]
        assert data["body_bytes_per_token"] == per_token
        head_alone = most_of_default(plan_data(capsys, *SIZES, *memory, *options))
        most = most_of_default(data)
        assert 100 < most < head_alone
        assert most * per_token < 1 << 30
        assert f"max_tokens_per_micro_batch = {most}\n" in plan(capsys, *dense, *options)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    mixture = Qwen3MoeConfig(**sizes, **experts, head_dim=16)
    mixed = plan_data(capsys, "--model", save(mixture, tmp_path / "mixture"), *memory)
    per_token = (3 + 4) * 64 * 2 + 64 * (32 + 2 * 4) + 64 * 16 + 2 * 48 * 12
    assert mixed["body_bytes_per_token"] == per_token
    hybrid = Qwen2Config(**sizes, layer_types=["linear_attention"] * 3)
    unknown = plan_data(capsys, "--model", save(hybrid, tmp_path / "hybrid"), *memory)
    assert unknown["body_bytes_per_token"] is None


def test_a_model_of_the_hub_is_read_from_its_cache_where_no_hub_answers(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is tried again"))
    wanted = ("plan", "--tokens", "5", "--model", "org/model")
    assert "transformers cannot read 'org/model': We couldn't connect" in error(capsys, *wanted)
    folder = tmp_path / "models--org--model"
    save(Qwen2Config(hidden_size=64, vocab_size=1000), folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert "model: hidden size 64, vocabulary 1,000" in plan(capsys, *wanted[3:])


UNREADABLE = "--model: transformers cannot read"
OWN_CODE = '{"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}'
ONE_FLOAT = Qwen2Config(hidden_size=64, dtype="float64").to_json_string(use_diff=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "--model: no config.json in folder 'here'"),
        ("not json", UNREADABLE),
        ('{"model_type": "qwen2", "hidden_size": "wide"}', "error for field 'hidden_size'"),
        (OWN_CODE, UNREADABLE),
        (ONE_FLOAT, "--dtype: expected one of torch.bfloat16, torch.float16, torch.float32; got"),
        (
            ViTConfig().to_json_string(use_diff=False),
            "--model: expected vocab_size > 0 in the config",
        ),
    ],
)
def test_models_without_a_head(capsys, tmp_path, monkeypatch, config, expected) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    if config is not None:
        Path("here", "config.json").write_text(config)
    assert expected in error(capsys, "plan", "--tokens", "5", "--model", "here")


def test_exponentials_that_are_kept_take_no_more_than_logits_in_bf16() -> None:
    """One tensor of the size of the logits, and the hidden states times a factor each."""
    for tokens, hidden in ((4096, 2048), (8192, 2048), (8192, 4096)):
        call = Call(
            name="exponentials", tokens=tokens, hidden=hidden, vocabulary=151936,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        assert call.may_keep_exponentials and call.gemms == 3
        extra = growth(call) - call.returned
        assert extra == 2 * tokens * (151936 + hidden)
    assert not replace(call, tokens=4 * hidden + 1).may_keep_exponentials
    assert not replace(call, frozen=True).may_keep_exponentials
    assert not replace(call, options=RunOptions(activation_bytes=0)).may_keep_exponentials
