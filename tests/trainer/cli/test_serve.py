"""grpo-train serve: the command that it becomes."""

from __future__ import annotations

import pytest

from grpo_trainer import cli
from grpo_trainer.cli import serve


def test_the_command():
    handed_on = ["--max-model-len", "64", "--hos", "0.0.0.0"]  # vLLM knows abbreviations
    command = serve.serve_command(["--model", "m", "--port", "9000", *handed_on])
    assert command.words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    options = command.words[5:]
    assert options[-6:-2] == ["--host", "127.0.0.1", "--port", "9000"]
    assert options[options.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert options[-10:-6] == handed_on
    assert options[-2:] == ["--middleware", "grpo_trainer.cli.guard.Guard"]
    assert command.environment == {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}
    assert command.warning is None


def test_arguments_of_trl():
    words = ["--vllm_model_impl", "transformers", "--log_level=debug", "--enforce_eager", "true"]
    words += ["--enable_prefix_caching", "False", "--tensor_parallel_size", "2", "--enforce-eager"]
    options = serve.serve_command(["--model", "m", *words]).words
    at = options.index("--model-impl")
    assert options[at : at + 7] == [
        "--model-impl",
        "transformers",
        "--uvicorn-log-level=debug",
        "--enforce_eager",
        "--no-enable-prefix-caching",
        "--tensor_parallel_size",
        "2",
    ]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_warning(host):
    assert serve.serve_command(["--model", "m", "--host", host]).warning is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "gpu-node"])
def test_a_wider_address_needs_a_key(host, monkeypatch, capsys):
    words = ["--model", "m", "--host", host]
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        serve.serve_command(words)
    assert f"--host {host}: expected VLLM_API_KEY to be set" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        serve.serve_command([*words, "--api-key", ""])
    given = serve.serve_command([*words, "--api-key", "secret", "other"])
    assert given.words[given.words.index("--api-key") + 1 :][:2] == ["secret", "other"]
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    warning = serve.serve_command(words).warning
    assert warning is not None and warning.startswith(f"--host {host}: whoever has the API key")


def test_a_front_end_without_middleware(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SystemExit, match="2"):
        serve.serve_command(["--model", "m"])
    assert "VLLM_USE_RUST_FRONTEND: expected 0" in capsys.readouterr().err


def test_the_command_line_hands_over(monkeypatch, capsys):
    became = []
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(serve.os, "execve", lambda *args: became.append(args))
    cli.main(["serve", "--model", "m", "--host", "0.0.0.0"])
    [(program, words, environment)] = became
    assert words[0] == program and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "warning: --host 0.0.0.0" in capsys.readouterr().err


def test_without_vllm(monkeypatch, capsys):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "--model", "m"])
    assert "vllm is not installed" in capsys.readouterr().err
