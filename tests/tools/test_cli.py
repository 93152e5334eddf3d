"""``grpo-kernels``: what it prints, its exit codes, and its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, Qwen2Config, ViTConfig

from grpo_kernels import __version__, available_backends
from grpo_kernels.backends.registry import BACKEND_VARIABLE, BACKENDS
from grpo_kernels.tools import check as selfcheck
from grpo_kernels.tools import cli
from grpo_kernels.tools.check import Outcome
from grpo_kernels.tools.estimate import HeadShape, cost, predict_head_memory
from grpo_kernels.tools.estimate import command as plan_command

SIZES = ["--hidden", "64", "--vocab", "1000"]
FAST = ["--tflops", "100", "--bandwidth", "1000"]


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch):
    monkeypatch.setattr("grpo_kernels.tools.estimate.speed._SECONDS", 0.0)


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


def test_help_without_a_subcommand(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("info", "check", "plan"))


def test_module_is_runnable():
    run = subprocess.run(
        [sys.executable, "-m", "grpo_kernels.tools.cli", "plan", "--tokens", "0"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 2
    assert run.stderr == (
        "grpo-kernels plan: error: argument --tokens: expected a whole number > 0; got '0'\n"
    )


def test_info(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for expected in (__version__, torch.__version__, "transformers", "cpu, bfloat16", *BACKENDS):
        assert expected in out


def test_info_for_programs(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    available = [name for name, reason in facts["backends"].items() if reason is None]
    assert tuple(available) == available_backends()
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    first = facts["defaults"][0]
    assert first["device"] == "cpu" and first["backend"] in available and first["chunk_rows"] > 0
    assert facts["devices"][0]["memory_bytes"] > 1 << 20


def test_info_says_that_a_forced_backend_cannot_run(capsys, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "quantum")
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
    assert ", 0 failed" in out


def test_check_fails_on_a_wrong_gradient(capsys, monkeypatch):
    right = selfcheck._RUNS["linear_logprobs"]

    def wrong(problem, backend, tile):
        results = right(problem, backend, tile)
        if backend == "chunked":
            results["dweight"] = results["dweight"] * 1.01
        return results

    only_one(monkeypatch, wrong)
    assert cli.main(["check"]) == 1
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "FAILED" in line]
    assert lines and all(line.startswith("chunked") for line in lines)
    assert ", 1 failed" in out


def test_check_reports_an_exception(capsys, monkeypatch):
    right = selfcheck._RUNS["linear_logprobs"]

    def broken(problem, backend, tile):
        if backend == "chunked":
            raise RuntimeError("no such instruction\nsecond line")
        return right(problem, backend, tile)

    only_one(monkeypatch, broken)
    assert cli.main(["check"]) == 1
    assert "FAILED: RuntimeError: no such instruction\n" in capsys.readouterr().out


def only_one(monkeypatch, run) -> None:
    """One check for each backend on the CPU."""
    selfcheck._eager.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(selfcheck, "_RUNS", {"linear_logprobs": run})
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.float32,))
    monkeypatch.setattr(selfcheck, "device_types", lambda: ["cpu"])


def test_nan_fails():
    outcome = Outcome("cpu", "cpu", "float32", "x", error=float("nan"), allowed=1.0)
    assert not outcome.ok
    assert replace(outcome, error=0.5).ok


def test_plan_agrees_with_the_formulas(capsys):
    data = plan_data(capsys, *SIZES, *FAST, "--gpu-memory", "1GiB", "--dtype", "fp32")
    head = HeadShape(hidden=64, vocabulary=1000, dtype=torch.float32)
    names = [line["implementation"] for line in data["implementations"]]
    assert names == ["eager", "trl", "ours", "ours-two-pass", "ours"]
    for line in data["implementations"][:4]:
        prediction = predict_head_memory(line["implementation"], head, 100)
        assert line["total_bytes"] == prediction.total
        assert line["inputs_bytes"] + line["returned_bytes"] + line["extra_bytes"] == (
            prediction.total
        )
        assert line["seconds"] > 0
        most = line["largest_micro_batch_tokens"]
        fits, more = (
            predict_head_memory(line["implementation"], head, n) for n in (most, most + 1)
        )
        assert fits.total <= 1 << 30 < more.total


def test_reserved_memory_and_frozen_head(capsys):
    everything = plan_data(capsys, *SIZES, *FAST, "--gpu-memory", "1GiB")
    less = plan_data(capsys, *SIZES, *FAST, "--gpu-memory", "1GiB", "--reserved", "512MiB")
    frozen = plan_data(capsys, *SIZES, *FAST, "--frozen-head")
    for all_of_it, half, still in zip(
        *(data["implementations"] for data in (everything, less, frozen)), strict=True
    ):
        assert 0 < half["largest_micro_batch_tokens"] < all_of_it["largest_micro_batch_tokens"]
        assert still["returned_bytes"] == 100 * 64 * 2
    none = plan(capsys, *SIZES, *FAST, "--gpu-memory", "1GiB", "--reserved", "1GiB")
    assert none.count("not one token") == 5


def test_plan_says_what_it_counts_and_from_what(capsys, monkeypatch):
    monkeypatch.setattr(cost, "RATES", {})  # nothing was fitted
    out = plan(capsys, *SIZES, "--gpu-memory", "24GiB", "--gpu", "rtx 4090")
    assert "prediction" in out and "data sheet of RTX 4090: 70% of its 165.2 TFLOP/s" in out
    for expected in ("hidden states", "head weight", "gradients", "nothing reserved", "24 GiB"):
        assert expected in out
    out = plan(capsys, *SIZES, *FAST)
    assert "100 TFLOP/s, 1000 GB/s, from: --tflops and --bandwidth." in out
    out = plan(capsys, *SIZES, *FAST, "--device", "cpu")
    assert "from: --bandwidth; else --tflops; else products and a copy" in out
    out = plan(capsys, *SIZES, "--gpu", "H200", "--bandwidth", "4000")
    assert "692 TFLOP/s, 4000 GB/s, from: --bandwidth; else data sheet of H200" in out
    out = plan(capsys, *SIZES, "--device", "cpu")
    assert "time, this CPU" in out and "timed just now" in out and "on cpu" in out


def test_plan_takes_what_was_fitted_and_marks_the_default(capsys, monkeypatch):
    row = (1e12, 1e12, 1e12, 1e30, 1e10, 0.0, 0.0)
    monkeypatch.setattr(cost, "class_of", lambda device: "cpu test")
    monkeypatch.setattr(cost, "MEASURED_ON", {"cpu test": {"device": "Test CPU", "threads": "1"}})
    monkeypatch.setattr(cost, "RATES", {("cpu test", dtype): row for dtype in ("fp32", "bf16")})
    arguments = ("--hidden", "64", "--vocab", "50000", "--device", "cpu", "--frozen-head")
    out = plan(capsys, *arguments, "--tokens", "64")
    assert "from: fitted on Test CPU." in out and "ours, one_pass (the default)" in out
    # a fourth product that costs nothing, and sums that cost all: so many chunks do not pay
    free = (*row[:2], 1e30, row[3], 1e6, *row[5:])
    monkeypatch.setattr(cost, "RATES", dict.fromkeys(cost.RATES, free))
    out = plan(capsys, *arguments[:-1], "--tokens", "100000")
    assert "ours, two_pass (the default)" in out and "ours, one_pass (the default)" not in out


def save(config, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_folder_and_file_of_a_model(capsys, tmp_path):
    config = Qwen2Config(hidden_size=64, vocab_size=1000, dtype="float16")
    folder = save(config, tmp_path / "policy")
    for model in (folder, f"{folder}/config.json"):
        data = plan_data(capsys, "--model", model, *FAST)
        assert data["model"] == "policy"
        assert data["head"] == {
            "hidden": 64,
            "vocabulary": 1000,
            "dtype": "float16",
            "weight_dtype": "float16",
            "frozen": False,
            "softcap": False,
        }
    data = plan_data(capsys, "--model", folder, *FAST, "--dtype", "bf16", "--weight-dtype", "fp32")
    assert (data["head"]["dtype"], data["head"]["weight_dtype"]) == ("bfloat16", "float32")


def test_multimodal_and_capped_models(capsys, tmp_path):
    text = Gemma3TextConfig(hidden_size=48, vocab_size=700)
    folder = save(Gemma3Config(text_config=text, dtype="bfloat16"), tmp_path / "images")
    head = plan_data(capsys, "--model", folder, *FAST)["head"]
    assert (head["hidden"], head["vocabulary"], head["dtype"]) == (48, 700, "bfloat16")
    folder = save(Gemma2Config(hidden_size=48, vocab_size=700), tmp_path / "capped")
    assert plan_data(capsys, "--model", folder, *FAST)["head"]["softcap"]


@pytest.mark.parametrize("value", ("24", "GiB", "24Gi", "-1GiB", "0GiB", "1e3GiB", ""))
def test_a_size_needs_a_number_and_a_unit(capsys, value):
    message = error(capsys, "plan", "--tokens", "1", *SIZES, f"--gpu-memory={value}")
    assert "argument --gpu-memory: expected a size with a unit" in message
    assert repr(value) in message


def test_units():
    assert plan_command._size("24GiB") == 24 << 30
    assert plan_command._size("1.5 kib") == 1536
    assert plan_command._size("80GB") == 80 * 10**9


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["--tokens", "0"], "argument --tokens: expected a whole number > 0; got '0'"),
        (["--tokens", "many"], "argument --tokens: expected a whole number > 0; got 'many'"),
        (["--tokens", "9" * 20], "argument --tokens: expected a number <= 2147483647; got '9999"),
        (["--gpu-memory", "9" * 20 + "TiB"], "--gpu-memory: expected at most 16 TiB; got '999"),
        (["--gpu-memory", "9" * 400 + "GiB"], "--gpu-memory: expected at most 16 TiB; got '999"),
        (["--hidden", "-3"], "argument --hidden: expected a whole number > 0; got '-3'"),
        (["--tflops", "nan"], "argument --tflops: expected a number > 0; got 'nan'"),
        (["--gpu", "abacus"], "argument --gpu: expected one of H100 PCIe"),
        (["--gpu", "H200", "--device", "cpu"], "with --device cuda; got 'H200'"),
        (["--gpu", "H200"], "argument --gpu: not allowed with --tflops and --bandwidth"),
        (["--max-workspace", "1KiB"], "argument --max-workspace: expected at least 4000"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (
            ["--dtype", "fp32", "--weight-dtype", "bf16"],
            "argument --weight-dtype: expected fp32 or the dtype of the hidden states; got bf16",
        ),
        (["--model", "."], "argument --model: not allowed with --hidden"),
        (["--token", "5"], "unrecognized arguments: --token 5"),
    ],
)
def test_errors_name_the_argument(capsys, arguments, expected):
    rates = [] if "cpu" in arguments or "abacus" in arguments else FAST
    options = ["plan", *SIZES, *rates, *(["--tokens", "5"] if "--tokens" not in arguments else [])]
    assert expected in error(capsys, *options, *arguments)


def test_models_without_a_head(capsys, tmp_path):
    def message(model: object) -> str:
        return error(capsys, "plan", "--tokens", "5", *FAST, "--model", str(model))

    assert f"argument --model: no config.json in folder '{tmp_path}'" in message(tmp_path)
    assert "argument --model: no folder or file 'org/model'" in message("org/model")
    (tmp_path / "config.json").write_text("{}")
    assert f"argument --model: transformers cannot read '{tmp_path}'" in message(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    assert f"argument --model: transformers cannot read '{tmp_path}'" in message(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": "wide"}')
    assert "Validation error for field 'hidden_size'" in message(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}'
    )
    assert f"argument --model: transformers cannot read '{tmp_path}'" in message(tmp_path)
    Qwen2Config(hidden_size=64, dtype="float64").save_pretrained(tmp_path)
    assert "argument --dtype: the config says torch.float64; expected one of" in message(tmp_path)
    ViTConfig().save_pretrained(tmp_path)
    assert f"argument --model: the config of '{tmp_path}' has no vocab_size" in message(tmp_path)
    assert "argument --model: expected it, or both" in error(capsys, "plan", "--tokens", "5")


def test_unknown_subcommand(capsys):
    assert "invalid choice: 'bench'" in error(capsys, "bench")
