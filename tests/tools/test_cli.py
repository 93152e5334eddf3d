"""``grpo-kernels``: what it prints, its exit codes, and its one-line errors."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from huggingface_hub import constants
from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, Qwen2Config, ViTConfig

from grpo_kernels import Bounded, __version__, available_backends
from grpo_kernels.backends.registry import BACKEND_VARIABLE, BACKENDS
from grpo_kernels.tools import canaries, cli, install_command
from grpo_kernels.tools import check as selfcheck
from grpo_kernels.tools.check import Outcome
from grpo_kernels.tools.estimate import HeadShape, command, estimate_memory
from grpo_kernels.tools.text import byte_size, in_units

SIZES = ["--hidden", "64", "--vocab", "1000"]


def plan(capsys, *arguments: str) -> str:
    assert cli.main(["plan", "--tokens", "100", *arguments]) == 0
    return capsys.readouterr().out


def plan_data(capsys, *arguments: str) -> dict:
    return json.loads(plan(capsys, *arguments, "--json"))


def error(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_a_package_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: _REQUIRES)
    assert error(capsys, "plan", "--model", ".", "--tokens", "8") == (
        "grpo-kernels plan: error: expected the package transformers to be installed; "
        "pip install 'transformers>=5'\n"
    )


_REQUIRES = [
    "torch>=2",
    'transformers>=5; extra == "tools"',
    'grpo-kernels[tools]; extra == "trainer"',
    'rich; extra == "trainer"',
]


def test_advice_to_install_names_packages_that_an_index_has(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: _REQUIRES)
    assert install_command("tools", "trainer") == "pip install 'transformers>=5' rich"

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("tools", "trainer") == "pip install '.[tools,trainer]'"


def test_info_runs_with_torch_alone(capsys, monkeypatch):
    total = psutil.virtual_memory().total
    for name in ("psutil", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["info"]) == 0
    assert f", {in_units(total)}, capability" in capsys.readouterr().out


def test_info(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for expected in (__version__, torch.__version__, "transformers", "cpu, bfloat16", *BACKENDS):
        assert expected in out
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    available = [name for name, reason in facts["backends"].items() if reason is None]
    assert tuple(available) == available_backends()
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    first = facts["defaults"][0]
    assert first["device"] == "cpu" and first["backend"] in available and first["chunk_rows"] > 0
    assert facts["devices"][0]["memory_bytes"] > 1 << 20
    monkeypatch.setenv(BACKEND_VARIABLE, "quantum")  # which cannot run
    assert cli.main(["info"]) == 0
    assert f"{BACKEND_VARIABLE}: expected one of auto, triton" in capsys.readouterr().out


def test_check_passes_here(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.float32, torch.bfloat16))
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    for name, backend in BACKENDS.items():
        assert f"  {name}: {backend.unavailable() or 'available'}" in out
    assert "chunked    cpu    bfloat16 linear_policy_loss: gspo" in out
    assert "library    cpu    bfloat16 GEMMs of a step" in out
    assert ", 0 failed" in out


def wrong_gradient(right, problem, backend, tile):
    results = right(problem, backend, tile)
    if backend == "chunked":
        results["dweight"] = results["dweight"] * 1.01
    return results


def raises(right, problem, backend, tile):
    if backend == "chunked":
        raise RuntimeError("no such instruction\nsecond line")
    return right(problem, backend, tile)


def drops_a_part_of_k(right, out, a, b, *rest, **options):
    whole = a.shape[1] // 64 * 64
    right(out, a[:, :whole], b[:whole], *rest, **options)


def misreads_long_rows(right, out, a, b, *rest, **options):
    right(out, a, b, *rest, **options)
    if not (a.is_contiguous() or a.t().is_contiguous()) and a.amin() < a.amax():
        out[0, 0] += 1


@pytest.mark.parametrize(
    ("wrong", "dtype", "said"),
    [
        (wrong_gradient, torch.float32, ""),
        (raises, torch.float32, ": RuntimeError: no such instruction\n"),
        (
            drops_a_part_of_k,
            torch.bfloat16,
            ": dhidden, C 1 V 257 D 17: expected 257.0, got 256.0 to 256.0\n",
        ),
        (
            misreads_long_rows,
            torch.bfloat16,
            ": dhidden of a narrowed tile, C 7 V 1000 D 96: expected the bits of a copy, "
            "got 1 of 672 that differ\n",
        ),
    ],
)
def test_check_fails_on_what_is_wrong(capsys, monkeypatch, wrong, dtype, said):
    """Of the GEMMs and one check for each backend, on the CPU."""
    run = selfcheck._RUNS["linear_logprobs"]
    if dtype == torch.float32:
        run = functools.partial(wrong, run)
    else:
        monkeypatch.setattr(canaries, "accumulate", functools.partial(wrong, canaries.accumulate))
    selfcheck._eager.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(selfcheck, "_RUNS", {"linear_logprobs": run})
    monkeypatch.setattr(selfcheck, "DTYPES", (dtype,))
    monkeypatch.setattr(selfcheck, "device_types", lambda: ["cpu"])
    assert cli.main(["check"]) == 1
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "FAILED" in line]
    culprit = "chunked" if dtype == torch.float32 else "library"
    assert lines and all(line.startswith(culprit) for line in lines)
    assert f"FAILED{said}" in out and ", 1 failed" in out


def test_nan_fails():
    outcome = Outcome("cpu", "cpu", "float32", "x", error=float("nan"), allowed=1.0)
    assert not outcome.ok
    assert replace(outcome, error=0.5).ok


@pytest.mark.parametrize(("hidden", "vocabulary", "memory"), [(64, 1000, "1GiB"), (1, 2, "16TiB")])
def test_plan_agrees_with_the_formulas(capsys, hidden, vocabulary, memory):
    """And finds the largest micro-batch of a tiny head at once."""
    sizes = ("--hidden", str(hidden), "--vocab", str(vocabulary))
    data = plan_data(capsys, *sizes, "--tflops", "100", "--gpu-memory", memory, "--dtype", "fp32")
    head = HeadShape(hidden=hidden, vocabulary=vocabulary, dtype=torch.float32)
    names = [line["implementation"] for line in data["implementations"]]
    assert names == ["eager", "trl", "one_pass", "two_pass"]
    for line in data["implementations"]:
        name, most = line["implementation"], line["largest_micro_batch_tokens"]
        estimate = estimate_memory(name, head, 100)
        parts = [line[f"{part}_bytes"] for part in ("inputs", "returned", "extra")]
        assert sum(parts) == line["total_bytes"] == estimate.total
        fits, more = (estimate_memory(name, head, n) for n in (most, most + 1))
        assert fits.total <= byte_size(memory) < more.total
        assert line["seconds"] == pytest.approx(line["gemms"] * 2 * 100 * head.size / 100e12)


@pytest.mark.parametrize(
    ("options", "gemms"),
    [
        ("", [3, 4, 3, 4]),
        ("--max-workspace 64KiB", [3, 4, 3, 4, 3]),
        ("--frozen-head", [2, 3, 2, 2]),
        ("--frozen-head --activation-bytes 0", [2, 3, 2, 3]),
        ("--activation-bytes 1MiB", [3, 4, 3, 3]),
        ("--bounded", [3, 4, 3, 4, 2, 3, 1, 1]),
        ("--bounded --frozen-head", [2, 3, 2, 2, 1, 1]),
    ],
)
def test_time_is_that_of_the_gemms(capsys, options, gemms):
    lines = plan_data(capsys, *SIZES, *options.split())["implementations"]
    assert [line["gemms"] for line in lines] == gemms


LARGE = "--hidden 4096 --vocab 151936 --tokens 16384"
SMALL = "--hidden 64 --vocab 1000"
NO_TIME = "--gpu or --tflops"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LARGE, "the default for speed; schedule='two_pass' takes 2.053 GiB less, for one GEMM"),
        (f"{LARGE} --frozen-head", "schedule='two_pass' takes 235.6 MiB more and no GEMM more"),
        (f"{LARGE} --device cpu", "which      schedule='one_pass' takes 2.0"),
        (f"{SMALL} --gpu-memory 24GiB", "An estimate"),
        (f"{SMALL} --gpu-memory 24GiB", "gradients  of both"),
        (f"{SMALL} --gpu-memory 24GiB", "nothing reserved"),
        (f"{SMALL} --gpu-memory 24GiB", "24 GiB"),
        (f"{SMALL} --gpu-memory 1GiB --reserved 1GiB", "not one token"),
        (
            f"{SMALL} --gpu rtx_4090",
            "116 TFLOP/s, a guess, 70% of the 165.2 TFLOP/s in the data sheet of RTX 4090",
        ),
        (f"{SMALL} --tflops 100", "100 TFLOP/s, --tflops"),
        (f"{SMALL} --device cpu", "0.2 TFLOP/s, a guess, for 4 threads"),
        (f"{SMALL}", NO_TIME),
    ],
)
def test_plan_says(capsys, monkeypatch, options, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(command.cpu, "unavailable", lambda: "it was not built")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    words = [word.replace("_", " ") if "rtx" in word else word for word in options.split()]
    out = plan(capsys, *words)
    assert expected in out
    if expected == NO_TIME:
        data = plan_data(capsys, *words)
        assert data["tflops"] is None
        assert {line["seconds"] for line in data["implementations"]} == {None}


def test_the_rate_of_this_cpu_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(command.cpu, "unavailable", lambda: None)
    monkeypatch.setattr(command.cpu, "isa", lambda: "amx")
    out = plan(capsys, *SIZES, "--device", "cpu", "--dtype", "fp32")
    assert "0.8 TFLOP/s, measured on another CPU with amx, for 4 threads" in out


def test_plan_says_what_is_kept(capsys):
    options = (*SIZES, "--activation-bytes", "1MiB", "--gpu-memory", "1GiB", "--bounded", "64")
    *_, two, first, second, third, fourth = plan_data(capsys, *options)["implementations"]
    assert two["keeps"] == "dlogits"
    assert {line["keeps"] for line in (first, second, third, fourth)} == {"entries"}
    # more tokens than the budget is for, whose logits are formed again
    assert two["largest_micro_batch_tokens"] > (1 << 20) // 2000
    head, exact = HeadShape(hidden=64, vocabulary=1000), Bounded(slots=64)
    sparse = Bounded(slots=64, exact_weight=False)
    for name, line, bounded in (
        ("one_pass", first, exact),
        ("two_pass", second, exact),
        ("one_pass", third, sparse),
        ("two_pass", fourth, sparse),
    ):
        estimate = estimate_memory(name, head, 100, bounded=bounded)
        assert line["total_bytes"] == estimate.total
    out = plan(capsys, *options)
    assert "ours, two_pass, keeps dlogits" in out and "ours, one_pass, bounded" in out
    assert "sparse products" in out and "sparse" not in plan(capsys, *SIZES)


@pytest.mark.parametrize("how", ("fsdp", "zero3", "tp"))
def test_plan_of_one_rank(capsys, how):
    options = (*SIZES, "--shard", f"{how}=8", "--gpu-memory", "1GiB", "--tflops", "100")
    data, alone = plan_data(capsys, *options), plan_data(capsys, *SIZES, "--gpu-memory", "1GiB")
    assert data["head"] == alone["head"]
    assert (data["shard"]["ranks"], alone["shard"]) == (8, None)
    assert all(size > 0 for size in data["shard"]["sent_bytes"].values())
    parts = ("shards", "inputs", "returned", "extra")
    others = {(line["title"], line["implementation"]): line for line in alone["implementations"]}
    for line in data["implementations"]:
        assert line["total_bytes"] == sum(line[f"{part}_bytes"] for part in parts)
        other = others[line["title"], line["implementation"]]
        saves = how == "tp"
        assert (line["total_bytes"] < other["total_bytes"]) is saves
        fewer = line["largest_micro_batch_tokens"] < other["largest_micro_batch_tokens"]
        assert fewer or saves  # of many tokens the fp32 gradient of the hidden states is the most
        size = 64 * (125 if saves else 1000)
        assert line["seconds"] == pytest.approx(line["gemms"] * 2 * 100 * size / 100e12)
    out = plan(capsys, *options)
    assert f"one of 8 ranks with {data['shard']['by']}" in out and "sent       by a rank" in out
    assert ("eager" in out) is ("shards     of the weight" in out) is (how != "tp")
    frozen = plan(capsys, *options, "--frozen-head")
    assert "to reduce and scatter" not in frozen


def test_reserved_memory_and_frozen_head(capsys):
    everything = plan_data(capsys, *SIZES, "--gpu-memory", "1GiB")
    less = plan_data(capsys, *SIZES, "--gpu-memory", "1GiB", "--reserved", "512MiB")
    frozen = plan_data(capsys, *SIZES, "--frozen-head")
    for all_of_it, half, still in zip(
        *(data["implementations"] for data in (everything, less, frozen)), strict=True
    ):
        assert 0 < half["largest_micro_batch_tokens"] < all_of_it["largest_micro_batch_tokens"]
        assert still["returned_bytes"] == 100 * 64 * 2


def test_plan_marks_the_default(capsys):
    def default(*options: str) -> str:
        lines = plan_data(capsys, "--hidden", "64", "--vocab", "50000", *options)["implementations"]
        (name,) = [x["implementation"] for x in lines if x["title"].endswith(" (the default)")]
        return name

    many = ("--device", "cpu", "--tokens", "100000")
    assert default("--device", "cpu") == "one_pass"  # one chunk
    assert default(*many) == "two_pass"
    assert default(*many, "--frozen-head") == default(*many, "--dtype", "fp32") == "one_pass"


@pytest.mark.parametrize(
    "driver,name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA GeForce GTX 970", None),
        *((name, None) for name in ("H1000", "XH100", "A1000", "RTX 40900", "MI300X2")),
        *((row[0], row[0]) for row in command.GPUS),
    ],
)
def test_gpus_are_found_by_their_names(driver, name):
    row = command.find_gpu(driver)
    assert (row and row[0]) == name


def save(config, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_folder_and_file_of_a_model(capsys, tmp_path):
    config = Qwen2Config(hidden_size=64, vocab_size=1000, dtype="float16")
    folder = save(config, tmp_path / "policy")
    for model in (folder, f"{folder}/config.json"):
        data = plan_data(capsys, "--model", model)
        assert data["model"] == "policy"
        assert data["head"] == {
            "hidden": 64,
            "vocabulary": 1000,
            "dtype": "float16",
            "weight_dtype": "float16",
            "frozen": False,
            "softcap": False,
        }
    data = plan_data(capsys, "--model", folder, "--dtype", "bf16", "--weight-dtype", "fp32")
    assert (data["head"]["dtype"], data["head"]["weight_dtype"]) == ("bfloat16", "float32")


def test_multimodal_and_capped_models(capsys, tmp_path):
    text = Gemma3TextConfig(hidden_size=48, vocab_size=700)
    folder = save(Gemma3Config(text_config=text, dtype="bfloat16"), tmp_path / "images")
    head = plan_data(capsys, "--model", folder)["head"]
    assert (head["hidden"], head["vocabulary"], head["dtype"]) == (48, 700, "bfloat16")
    folder = save(Gemma2Config(hidden_size=48, vocab_size=700), tmp_path / "capped")
    assert plan_data(capsys, "--model", folder)["head"]["softcap"]


def test_units():
    assert byte_size("24GiB") == 24 << 30
    assert byte_size("1.5 kib") == 1536
    assert byte_size("80GB") == 80 * 10**9


@pytest.mark.parametrize(
    "arguments,expected",
    [
        *(
            ([f"--gpu-memory={value}"], f"--gpu-memory: expected a size with a unit .*{value!r}")
            for value in ("24", "GiB", "24Gi", "-1GiB", "0GiB", "1e3GiB", "")
        ),
        (["--tokens", "0"], "argument --tokens: expected a whole number > 0; got '0'"),
        (["--bounded", "0"], "argument --bounded: "),
        (["--tokens", "many"], "argument --tokens: expected a whole number > 0; got 'many'"),
        (["--tokens", "9" * 20], "argument --tokens: expected a number <= 2147483647; got '9999"),
        (["--gpu-memory", "9" * 20 + "TiB"], "--gpu-memory: expected at most 16 TiB; got '999"),
        (["--gpu-memory", "9" * 400 + "GiB"], "--gpu-memory: expected at most 16 TiB; got '999"),
        (["--hidden", "-3"], "argument --hidden: expected a whole number > 0; got '-3'"),
        (["--tflops", "nan"], "argument --tflops: expected a number > 0; got 'nan'"),
        (["--gpu", "abacus"], "argument --gpu: expected one of H100 PCIe"),
        (["--gpu", "H1000"], "argument --gpu: expected one of H100 PCIe"),
        (["--gpu", "H200", "--device", "cpu"], "with --device cuda; got 'H200'"),
        (["--gpu", "H200", "--tflops", "1"], "argument --gpu: not allowed with --tflops"),
        (["--max-workspace", "1KiB"], "argument --max-workspace: expected at least 4000"),
        (
            ["--shard", "pp=2"],
            "argument --shard: expected one of fsdp=N, zero3=N, tp=N, N ranks; got",
        ),
        (["--shard", "tp=0"], "argument --shard: expected a whole number > 0; got '0'"),
        (["--shard", "fsdp"], "argument --shard: expected a whole number > 0; got ''"),
        (["--shard", "tp=2", "--bounded"], "argument --bounded: not allowed with a part of the"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (
            ["--dtype", "fp32", "--weight-dtype", "bf16"],
            "argument --weight-dtype: expected torch.float32 or that of the hidden states, ",
        ),
        (["--model", "."], "argument --model: not allowed with --hidden"),
        (["--token", "5"], "unrecognized arguments: --token 5"),
    ],
)
def test_errors_name_the_argument(capsys, arguments, expected):
    tokens = [] if "--tokens" in arguments else ["--tokens", "5"]
    assert re.search(expected, error(capsys, "plan", *SIZES, *tokens, *arguments))


def test_a_model_of_the_hub_is_read_from_its_cache_where_no_hub_answers(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is tried again"))
    wanted = ("plan", "--tokens", "5", "--model", "org/model")
    said = error(capsys, *wanted)
    assert "argument --model: transformers cannot read 'org/model': We couldn't connect" in said
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
        ("{}", UNREADABLE),
        ("not json", UNREADABLE),
        ('{"model_type": "qwen2", "hidden_size": "wide"}', "error for field 'hidden_size'"),
        (OWN_CODE, UNREADABLE),
        (ONE_FLOAT, "--dtype: expected one of torch.float32, torch.bfloat16, torch.float16; got"),
        (ViTConfig().to_json_string(use_diff=False), "--model: the config of 'here' has no vocab"),
    ],
)
def test_models_without_a_head(capsys, tmp_path, monkeypatch, config, expected):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    if config is not None:
        Path("here", "config.json").write_text(config)
    assert expected in error(capsys, "plan", "--tokens", "5", "--model", "here")


def test_what_is_left_out(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("info", "check", "doctor", "plan"))
    assert "invalid choice: 'bench'" in error(capsys, "bench")
    assert "argument --model: expected it, or both" in error(capsys, "plan", "--tokens", "5")
    missing = error(capsys, "plan", "--tokens", "5", "--model", "./org/model")
    assert "argument --model: no folder or file './org/model'" in missing
