"""grpo-train serve: the command that it becomes."""

from __future__ import annotations

import pytest

from grpo_trainer import cli, serve


def test_the_command():
    command = serve.serve_command(["--model", "m", "--port", "9000", "--max-model-len", "64"])
    assert command.words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    options = command.words[5:]
    assert options[:4] == ["--host", "127.0.0.1", "--port", "9000"]
    assert options[options.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert options[-2:] == ["--max-model-len", "64"]
    assert command.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    assert command.warning is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_warning(host):
    assert serve.serve_command(["--model", "m", "--host", host]).warning is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "gpu-node"])
def test_a_wider_address_is_warned_of(host, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    warning = serve.serve_command(["--model", "m", "--host", host]).warning
    assert warning is not None
    assert host in warning and "VLLM_API_KEY is not set" in warning
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    warning = serve.serve_command(["--model", "m", "--host", host]).warning
    assert warning is not None and "VLLM_API_KEY is not set" not in warning


def test_the_command_line_hands_over(monkeypatch, capsys):
    became = []
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
