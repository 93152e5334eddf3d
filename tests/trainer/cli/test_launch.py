"""Arguments of `accelerate launch` among those of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from grpo_trainer.cli import launch
from grpo_trainer.cli import train as cli

RUN = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "think_format_reward"]
RUN += ["--use_cpu", "--output_dir", "out", "--num_generations", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
MODULE = ["-m", "grpo_trainer.cli"]


class StartedError(Exception):
    """The process has become another one."""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (launch._LAUNCHED, *launch._OTHERS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch):
    def start(argv: list[str]) -> tuple[list[str], list[str]]:
        """Return what the launcher gets, and what the run gets."""
        monkeypatch.setattr(launch.os, "execve", execve)
        with pytest.raises(StartedError):
            cli.main(argv)
        [(words, environment)] = became
        became.clear()
        assert words[:4] == ACCELERATE and environment[launch._LAUNCHED] == "1"
        at = words.index("grpo_trainer.cli")
        assert launch_command_parser().parse_args(words[4:]).training_script == "grpo_trainer.cli"
        return words[4 : at - 1], words[at + 1 :]

    def execve(program, words, environment):
        became.append((words, environment))
        raise StartedError

    became: list = []
    return start


def test_on_the_command_line(started):
    words = [*RUN[:4], "--num_processes", "2", *RUN[4:], "--multi-gpu", "--main_process_port=29501"]
    launcher, run = started(words)
    assert launcher == ["--num_processes", "2", "--multi_gpu", "--main_process_port", "29501"]
    assert run == RUN


def test_in_a_file(started, monkeypatch):
    Path("run.yaml").write_text(
        "accelerate_config: fsdp2\nnum_processes: 2\nuse_cpu: true\nmulti_gpu: true\n"
        "use_deepspeed: false\n"
    )
    argv = ["--config", "run.yaml", *RUN, "--num_processes", "4"]
    launcher, run = started(argv)
    file = launcher[1]
    assert launcher == ["--config_file", file, "--num_processes", "4", "--multi_gpu"]
    assert yaml.safe_load(Path(file).read_text())["fsdp_config"]["fsdp_version"] == 2
    assert run == ["--config", "run.yaml", *RUN]
    with pytest.raises(ValueError, match="--config_file .* expected no arguments of `accelerate"):
        cli.parse(run)
    monkeypatch.setenv(launch._LAUNCHED, "1")
    assert cli.parse(run)[1].num_generations == 2  # what the started processes do


def test_a_file_of_ones_own(started):
    Path("mine.yaml").write_text("num_processes: 2\n")
    assert started([*RUN, "--accelerate_config", "mine.yaml"])[0] == ["--config_file", "mine.yaml"]


def fails(capsys, argv: list[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    return capsys.readouterr().err


def test_what_is_wrong(capsys, monkeypatch):
    message = fails(capsys, [*RUN, "--accelerate_config", "zero4"])
    assert "accelerate_config: expected a file, or one of fsdp2, multi_gpu, single_gpu" in message
    assert "--num_proc: there is no such argument" in fails(capsys, [*RUN, "--num_proc", "2"])
    monkeypatch.setenv("RANK", "0")
    message = fails(capsys, [*RUN, "--num_processes", "2"])
    assert message.startswith("grpo-train: error: --num_processes 2: expected no arguments of")


@pytest.mark.parametrize("path", sorted(launch._FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_that_have_names(path):
    assert yaml.safe_load(path.read_text())["num_processes"] >= 1
