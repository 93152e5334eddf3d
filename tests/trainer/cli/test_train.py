"""Runs that the command line starts: what they read, how they load, what they become."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset, IterableDataset
from huggingface_hub import constants
from safetensors.torch import load_file

from grpo_trainer import cli
from grpo_trainer.cli import main, parser, serve
from grpo_trainer.cli.train import build_trainer, parse
from tests.trainer.cli.runs import a_judge, arguments, write_module


def rows(count: int | None = None) -> Dataset:
    found = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    return Dataset.from_list(found[:count])


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "folder"])
def test_dataset_files(kind):
    # CSV has no types: an answer like 012 would come back as a number
    dataset, name = rows().remove_columns("answer"), f"given.{kind}"
    if kind == "folder":
        name = "data"
        for split in ("train", "test"):
            dataset.to_json(f"data/{split}.jsonl")
    else:
        {"csv": dataset.to_csv, "parquet": dataset.to_parquet}.get(kind, dataset.to_json)(name)
    names = {"dataset_name": name, "eval_dataset_name": None if kind == "folder" else name}
    trainer = build_trainer(
        arguments(reward_funcs="think_format_reward", eval_strategy="steps", **names)
    )
    assert len(trainer.train_dataset) == len(trainer.eval_dataset) == len(dataset)
    streamed = build_trainer(arguments(dataset_name=name, dataset_streaming=True))
    assert isinstance(streamed.train_dataset, IterableDataset) and streamed.eval_dataset is None


def test_what_rows_of_others_may_open(monkeypatch):
    def allowed(name="rows.jsonl", **changes):
        args = build_trainer(arguments(dataset_name=name, **changes)).args
        return args.allow_remote_images, args.allowed_media_path

    assert allowed() == (None, None)
    monkeypatch.setattr("grpo_trainer.cli.train.load_prompts", lambda *given, **options: rows())
    assert allowed("owner/name") == (False, constants.HF_HUB_CACHE)
    own = {"allow_remote_images": True, "allowed_media_path": "."}
    assert allowed("owner/name", **own) == (True, ".")
    assert allowed(eval_dataset_name="owner/name") == (False, constants.HF_HUB_CACHE)


def test_an_adapter_is_trained_on():
    pytest.importorskip("peft")
    new = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 2}
    main(arguments(**new))
    reward = "tests.support.trainer.rows_reward"
    more = {"model_name_or_path": "out", "output_dir": "more", "learning_rate": 0.1}
    main(arguments(**more, reward_funcs=reward))
    first, second = (load_file(Path(name, "adapter_model.safetensors")) for name in ("out", "more"))
    assert first.keys() == second.keys() and not Path("more", "model.safetensors").exists()
    assert any(not torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(SystemExit):
        main(arguments(model_name_or_path="out", output_dir="again", **new))


def test_config_file_and_reward_beside_the_data():
    write_module("beside", "def one(completions, **_):\n    return [1.0] * len(completions)\n")
    a_judge("judge", labels=1)
    Path("run.yaml").write_text(
        "model_name_or_path: model\nreward_model_name_or_path: judge\n"
        "dataset_name: rows.jsonl\n"
        "reward_funcs: [beside.one, think_format_reward]\nlearning_rate: 1e-3\nnum_generations: 2\n"
        "per_device_train_batch_size: 4\nuse_cpu: true\nbeta: 0.5\n"
    )
    named = ["--dtype", "bfloat16", "--attn_implementation", "eager"]
    trainer = build_trainer(["--config", "run.yaml", "--num_generations", "4", *named])
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.args.num_generations == 4
    assert (trainer.args.learning_rate, trainer.args.beta) == (1e-3, 0.5)
    assert trainer.reward_func_names == ["judge", "one", "think_format_reward"]


def test_a_function_compares_the_completions():
    write_module("own", "def by_row(rewards, **_):\n    return [*range(len(rewards))]\n")
    trainer = build_trainer(arguments(advantages="own.by_row"))
    trainer.train()
    [batch] = trainer._buffer.batches
    assert batch.advantages.tolist() == [0.0, 1.0, 2.0, 3.0]


PRESSING = """
import signal

def reward(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 0:
        signal.raise_signal(signal.SIGINT)
    return [0.0] * len(completion_ids)
"""


def test_a_run_that_is_ended_goes_on(capfd):
    write_module("pressing", PRESSING)
    run = arguments(reward_funcs="pressing.reward", max_steps=2, save_strategy="steps")
    with pytest.raises(SystemExit) as end:
        main(run)
    assert end.value.code == 130
    assert capfd.readouterr().err.splitlines()[-1] == (
        "grpo-train: stopped after step 1; newest checkpoint: out/checkpoint-1; "
        "to continue from it, pass --resume_from_checkpoint true, or in Python "
        "train(resume_from_checkpoint=True)"
    )
    main([*run, "--resume_from_checkpoint", "true"])
    names = ("model.safetensors", "trainer_state.json", "report.html")
    for name in names:  # as if it had been killed after its last checkpoint
        Path("out", name).unlink()
    main([*run, "--resume_from_checkpoint", "true"])
    assert all(Path("out", name).exists() for name in names)


def test_ctrl_c_that_a_library_stumbles_over(monkeypatch, capsys):
    """As torch's stack of modes does while a model is loaded."""

    def stumble(argv):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("trying to pop from empty mode stack")  # noqa: B904

    monkeypatch.setattr(cli, "_run", stumble)
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 130 and capsys.readouterr().err == "grpo-train: stopped\n"


def test_installed_modules_come_before_those_beside_the_data(tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "a_tracker.py").write_text("WHERE = 'installed'\n")
    monkeypatch.syspath_prepend(installed)
    write_module("a_tracker", "raise RuntimeError('run from the working directory')\n")
    write_module("my_losses", "import a_tracker\n\nWHERE = a_tracker.WHERE\n")
    try:
        parse(arguments(import_modules="my_losses"))
        assert sys.modules["my_losses"].WHERE == "installed"
    finally:
        for name in ("a_tracker", "my_losses"):
            sys.modules.pop(name, None)


class StartedError(Exception):
    """The process has become another one."""


@pytest.fixture
def started(monkeypatch):
    """Return a command's program, words and environment, in place of starting it."""

    def start(argv: list[str]) -> tuple:
        with pytest.raises(StartedError) as error:
            main(argv)
        return error.value.args

    def execve(*given):
        raise StartedError(*given)

    for name in (parser._LAUNCHED, *parser._OTHERS, "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.execve", execve)
    return start


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]


def launched(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what the launcher gets, and what the run gets."""
    assert words[:4] == ACCELERATE
    at = words.index("grpo_trainer.cli")
    assert launch_command_parser().parse_args(words[4:]).training_script == "grpo_trainer.cli"
    return words[4 : at - 1], words[at + 1 :]


def test_arguments_of_the_launcher(started, monkeypatch, capsys):
    run = arguments()
    more = ["--num_processes", "2", *run[4:], "--multi-gpu", "--main_process_port=29501"]
    _, words, environment = started([*run[:4], *more])
    assert launched(words) == (
        ["--num_processes", "2", "--multi_gpu", "--main_process_port", "29501"], run,
    )  # fmt: skip
    assert environment[parser._LAUNCHED] == "1"

    Path("run.yaml").write_text(
        "accelerate_config: fsdp2\nnum_processes: 2\nmulti_gpu: true\nuse_deepspeed: false\n"
    )
    run = ["--config", "run.yaml", *run]
    launcher, own = launched(started([*run, "--num_processes", "4"])[1])
    file = launcher[1]
    assert launcher == ["--config_file", file, "--num_processes", "4", "--multi_gpu"]
    assert yaml.safe_load(Path(file).read_text())["fsdp_config"]["fsdp_version"] == 2
    assert own == run
    with pytest.raises(ValueError, match="--config_file .* expected arguments of `accelerate"):
        parse(run)
    monkeypatch.setenv(parser._LAUNCHED, "1")
    assert parse(run)[1].num_generations == 4  # what the started processes do
    monkeypatch.delenv(parser._LAUNCHED)
    for wrong, said in (["--learning_rat", "1"], "--learning_rat: "), (["x"], "expected --name"):
        with pytest.raises(SystemExit):  # before the launcher is started
            main([*run, *wrong])
        assert said in capsys.readouterr().err
    Path("mine.yaml").write_text("num_processes: 2\n")
    words = started([*arguments(), "--accelerate_config", "mine.yaml"])[1]
    assert launched(words)[0] == ["--config_file", "mine.yaml"]


def test_the_command_of_a_server():
    handed_on = ["--max-model-len", "64", "--hos", "0.0.0.0"]  # vLLM knows abbreviations
    words, environment = serve.serve_command(["--model", "m", "--port", "9000", *handed_on])
    assert words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    options = words[5:]
    assert options[-10:-2] == [*handed_on, "--host", "127.0.0.1", "--port", "9000"]
    assert options[options.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert options[options.index("--generation-config") + 1] == "vllm"
    assert options[-2:] == ["--middleware", "grpo_trainer.cli.guard.Guard"]
    assert environment == {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}
    for flag in ("--enable-lora", "--enable_lora"):
        environment = serve.serve_command(["--model", "m", flag])[1]
        assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    # the names that the trainer has for them
    words = ["--vllm_gpu_memory_utilization", "0.5", "--vllm_tensor_parallel_size=2"]
    options = serve.serve_command(["--model", "m", *words])[0]
    at = options.index("--gpu_memory_utilization")
    assert options[at : at + 3] == ["--gpu_memory_utilization", "0.5", "--tensor_parallel_size=2"]


def test_a_wider_address_with_a_key(started, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    words = ["vllm-serve", "--model", "m", "--host", "0.0.0.0", "--api-key", "secret", "other"]
    program, given, environment = started(words)
    assert given[0] == program and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert given[given.index("--api-key") + 1 :][:2] == ["secret", "other"]
    assert "warning: --host 0.0.0.0: anyone with the API key" in capsys.readouterr().err
    for host in ("localhost", "127.1.2.3", "::1"):
        serve.serve_command(["--model", "m", "--host", host])
        assert capsys.readouterr().err == ""


def test_a_teacher_and_a_comparison_by_name():
    """With a teacher no reward function is needed."""
    main(arguments(reward_funcs=None, teacher="model", distillation="reverse_kl"))
    main(arguments(output_dir="out2", advantages="rloo"))
