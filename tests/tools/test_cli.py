"""``grpo-kernels``: what it prints, its exit codes, and its one-line errors."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import sys

import psutil
import pytest
import torch

from grpo_kernels import __version__, available_backends
from grpo_kernels.backends.choice import BACKEND_VARIABLE, BACKENDS
from grpo_kernels.tools import check as selfcheck
from grpo_kernels.tools import cli, install_command
from tests.support.launch import unread

SIZES = ["--hidden", "64", "--vocab", "1000"]


def error(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


REQUIRES = [
    "torch>=2",
    'transformers>=5.2; extra == "tools"',
    'grpo-kernels[tools]; extra == "trainer"',
    'rich; extra == "trainer"',
]


def test_what_is_not_installed_is_named_as_an_index_has_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    said = error(capsys, "plan", "--model", ".", "--tokens", "8")
    in_a_clone = "pip install '.[tools]' in a clone"
    assert said.endswith(f"to be installed; {in_a_clone}, or pip install 'transformers>=5.2'\n")
    assert install_command("tools", "trainer").endswith("or pip install 'transformers>=5.2' rich")

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("tools", "trainer") == "pip install '.[trainer]'"


def test_info(capsys, monkeypatch):
    total = psutil.virtual_memory().total
    for name in ("psutil", "transformers"):  # torch alone will do
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    available = [name for name, reason in facts["backends"].items() if reason is None]
    assert tuple(available) == available_backends()
    assert facts["defaults"][0]["device"] == "cpu" and facts["defaults"][0]["backend"] in available
    assert facts["devices"][0]["memory_bytes"] == total
    monkeypatch.setenv(BACKEND_VARIABLE, "quantum")  # which cannot run
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"{BACKEND_VARIABLE}: expected one of auto, triton" in out
    assert all(expected in out for expected in (__version__, torch.__version__, *BACKENDS))


def test_check_passes_here(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.float32, torch.bfloat16))
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    legend = out.partition("\nbackend ")[0]
    assert "\nerror: " in legend and "\nlibrary: " in legend
    for name, backend in BACKENDS.items():
        assert f"  {name}: {backend.unavailable() or 'available'}" in out
    assert "chunked    cpu    bfloat16 linear_policy_loss: gspo" in out
    assert "library    cpu    bfloat16 GEMMs of a step" in out
    assert ", 0 failed" in out


def wrong_gradient(factor, right, problem, backend, **options):
    results = right(problem, backend=backend, **options)
    if backend == "chunked":
        results["dweight"] = results["dweight"] * factor
    return results


def raises(right, problem, backend, **options):
    if backend == "chunked":
        raise RuntimeError("no such instruction\nsecond line")
    return right(problem, backend=backend, **options)


def drops_a_part_of_k(right, out, a, b, *rest, **options):
    whole = a.shape[1] // 64 * 64
    right(out, a[:, :whole], b[:whole], *rest, **options)


def misreads_long_rows(right, out, a, b, *rest, **options):
    right(out, a, b, *rest, **options)
    if not (a.is_contiguous() or a.t().is_contiguous()) and a.amin() < a.amax():
        out[0, 0] += 1


def test_doctor_names_the_hosts_that_are_here(capsys, monkeypatch):
    found = {"trl": "1.16.0", "ms-swift": "4.7"}
    monkeypatch.setattr(cli.machine, "installed_version", found.get)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "trl: 1.16.0 (trl, tested with 1.16)" in out
    assert "ms_swift: 4.7 (ms-swift, tested with 4.6)" in out
    assert "liger: not installed (liger-kernel, tested with 0.8.1, 0.8.5)" in out


@pytest.mark.parametrize(
    ("wrong", "dtype", "said"),
    [
        (functools.partial(wrong_gradient, 1.01), torch.float32, ""),
        (functools.partial(wrong_gradient, float("nan")), torch.float32, ""),
        (raises, torch.float32, ": RuntimeError: no such instruction\n"),
        (drops_a_part_of_k, torch.bfloat16, ": dhidden, C 1 V 257 D 17: 17 of 17 sums are wrong"),
        (misreads_long_rows, torch.bfloat16, ": dhidden, C 7 V 1000 D 96: 1 of 672 sums are wrong"),
    ],
)
def test_check_fails_on_what_is_wrong(capsys, monkeypatch, wrong, dtype, said):
    """Of the GEMMs and one check for each backend, on the CPU."""
    run = selfcheck._RUNS["linear_logprobs"]
    if dtype == torch.float32:
        run = functools.partial(wrong, run)
    else:
        monkeypatch.setattr(selfcheck, "accumulate", functools.partial(wrong, selfcheck.accumulate))
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


@pytest.mark.parametrize(
    "arguments,expected",
    [
        *(
            (f"--gpu-memory={x}", f"--gpu-memory: .*with a unit .*{x!r}")
            for x in ("24", "0GiB", "")
        ),
        (f"--gpu-memory {'9' * 400}GiB", "--gpu-memory: expected at most 16 TiB"),
        ("--tokens 0", "--tokens: expected a whole number > 0; got '0'"),
        ("--tokens many", "--tokens: expected a whole number > 0; got 'many'"),
        (f"--tokens {'9' * 20}", "--tokens: expected a number <= 2147483647"),
        ("--bounded 0", "--bounded: "),
        ("--hidden -3", "--hidden: expected a whole number > 0; got '-3'"),
        ("--tflops nan", "--tflops: expected a number > 0; got 'nan'"),
        ("--gpu H1000", "--gpu: expected one of H100 SXM"),
        ("--gpu H200 --device cpu", "with --device cuda; got 'H200'"),
        ("--gpu H200 --tflops 1", "--gpu: not allowed with --tflops"),
        ("--max-workspace 1KiB", "--max-workspace: expected at least 4000"),
        ("--shard pp=2", "--shard: expected tp=N for N ranks; got 'pp=2'"),
        ("--shard tp=0", "--shard: expected a whole number > 0; got '0'"),
        ("--shard tp", "--shard: expected a whole number > 0; got ''"),
        ("--shard tp=2 --bounded", "--bounded: not allowed with --shard"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--dtype fp32 --weight-dtype bf16", "--weight-dtype: expected torch.float32 or the dtype"),
        ("--model .", "--model: not allowed with --hidden"),
        ("--token 5", "unrecognized arguments: --token 5"),
    ],
)
def test_errors_name_the_argument(capsys, arguments, expected):
    tokens = [] if "--tokens" in arguments else ["--tokens", "5"]
    assert re.search(expected, error(capsys, "plan", *SIZES, *tokens, *arguments.split()))


COMMANDS = "info", "doctor", "check", "", "--help", "plan --hidden 64 --vocab 1000 --tokens 5"


@pytest.mark.parametrize("words", COMMANDS)
def test_output_may_be_read_in_part(monkeypatch, words):
    with unread() as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as stop:
            cli.main(words.split())
        assert stop.value.code == 1
        output.flush()  # as Python does at its end


def test_what_is_left_out(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("info", "check", "doctor", "plan"))
    assert "invalid choice: 'bench'" in error(capsys, "bench")
    assert "argument --model: expected a model, or both" in error(capsys, "plan", "--tokens", "5")
    missing = error(capsys, "plan", "--tokens", "5", "--model", "./org/model")
    assert "argument --model: no folder or file './org/model'" in missing
