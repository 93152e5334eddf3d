"""What the commands refuse, in one line that names the argument: by words, and what they name."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_trainer.checkpoint import CheckpointError
from grpo_trainer.cli import main
from grpo_trainer.cli import train as cli
from grpo_trainer.rewards import RewardError
from grpo_trainer.vllm import ServerError
from tests.trainer.cli.runs import a_judge, arguments


@pytest.fixture
def fails(capsys):
    """Return the one line by which a command refuses its words."""

    def fail(words: list[str]) -> str:
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        errors = [line for line in lines if re.match(r"grpo-train( \w+)?: error: ", line)]
        assert len(errors) == 1 and lines[-1] == errors[0]
        return errors[0]

    return fail


# changes of a run's arguments -> what is said before anything is loaded
EARLY = [
    ({"model_name_or_path": None}, "--model_name_or_path is required"),
    ({"reward_funcs": None}, "--reward_funcs is required"),
    ({"model_name_or_path": "checkpoint-3"}, "--model_name_or_path: no folder 'checkpoint-3'"),
    (
        {"dtype": "bfloat16", "model_init_kwargs": '{"dtype": "float16"}'},
        "dtype: expected it once, got 'bfloat16' and 'float16' in model_init_kwargs",
    ),
    ({"datasets": "a.jsonl"}, "--datasets: unknown argument"),
    ({"learning_rate": "fast"}, "argument --learning_rate"),
    ({"report_to": "swanlab"}, "report_to: expected trackers that are installed"),
    ({"loss_kwargs": '{"epsilom": 2}'}, "epsilom: expected a setting of dapo"),
    ({"output_dir": "taken/out"}, "--output_dir: expected a folder, got 'taken/out': taken is a f"),
    ({"output_dir": "model"}, "of another run, got 'model' with config.json; choose ano"),
    ({"resume_from_checkpoint": "true"}, "a checkpoint in output_dir 'out', got none"),
    ({"accelerate_config": "zero4"}, "accelerate_config: expected a file, or one of fsdp2, multi_"),
    ({"learning-rates": 1}, "unknown argument (is it learning_rate?)"),
    ({"config": "no.yaml"}, "no such file 'no.yaml'"),
]
# changes -> what is said when data, rewards and the model are loaded
LATE = [
    ({"dataset_name": "missing.jsonl"}, "dataset 'missing.jsonl': no such file"),
    ({"dataset_name": "./missing"}, "dataset './missing': no such folder"),
    ({"dataset_name": "hostile.csv"}, "got columns \\x1b[2Jquestion"),
    ({"dataset_name": "empty.jsonl"}, "dataset 'empty.jsonl': expected rows, got an empty file"),
    ({"dataset_name": "broken.jsonl"}, "JSON parse error"),
    ({"dataset_name": "deep.jsonl"}, "it is nested too deep"),
    ({"dataset_name": "broken.parquet"}, "Parquet"),
    ({"dataset_name": "long.jsonl"}, "expected at most 60 tokens"),
    ({"reward_funcs": "no_such_reward"}, "reward_funcs: expected"),
    ({"reward_funcs": "judge"}, "1 label"),
    ({"model_name_or_path": "folder"}, "no config.json"),
    ({"model_name_or_path": "damaged"}, "model 'damaged' cannot be loaded"),
    ({"model_name_or_path": "mute"}, "processing_class: expected a tokenizer"),
    ({"model_init_kwargs": '{"nothing": 1}'}, "model_init_kwargs: expected known names: "),
    ({"reward_funcs": "unbound.f"}, "NameError: name 'z' is not defined (unbound.py, line 2)"),
    ({"advantages": "ppo"}, "advantages: expected a function or one of rloo"),
    ({"advantages": "json.none"}, "--advantages: module 'json' has no 'none'"),
    ({"tools": "needs.f"}, "No module named 'not_there' (needs.py, line 1)"),
    ({"reward_funcs": "unbond.f"}, "'unbond'; it isn't in the working directory '"),
    ({"reward_funcs": "unbond.f"}, "' either (is it unbound?)"),
    ({"import_modules": "script"}, "module 'script' cannot be imported: SystemExit: 0 (script.py"),
]


@pytest.fixture(scope="module")
def places(a_room, tmp_path_factory) -> Path:
    """Make a working directory with everything that the cases name."""
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(a_room, folder, dirs_exist_ok=True)
    texts = {
        "taken": "",
        "hostile.csv": "\x1b[2Jquestion,answer\n1=,1\n",
        "empty.jsonl": "",
        "broken.jsonl": '{"prompt": "1="}\n{"prompt"',
        "deep.jsonl": f'{{"prompt": {"[" * 5000}{"]" * 5000}}}',
        "broken.parquet": "PAR",
        "long.jsonl": json.dumps({"prompt": "1" * 100, "answer": "1"}),
        "unbound.py": "x = 1\ny = z",
        "needs.py": "import not_there",
        "script.py": "raise SystemExit(0)",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    shutil.copytree(folder / "model", folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_text("weights")
    shutil.copytree(folder / "model", folder / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    a_judge(folder / "judge", labels=2)
    return folder


@pytest.mark.parametrize(("changes", "message"), EARLY, ids=str)
def test_before_anything_is_loaded(places, fails, monkeypatch, changes, message):
    monkeypatch.chdir(places)
    monkeypatch.setattr(cli, "GRPOTrainer", None)
    assert message in fails(arguments(**changes))
    assert not (places / "out").exists()


@pytest.mark.parametrize(("changes", "message"), LATE, ids=str)
def test_while_it_is_loaded(places, fails, monkeypatch, changes, message):
    monkeypatch.chdir(places)
    assert message in fails(arguments(**changes))


def test_a_server_that_is_not_there(fails):
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.01}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        message = fails(arguments(**server, vllm_server_port=unused.getsockname()[1]))
    assert "no connection" in message and "`grpo-train serve --model" in message


def test_a_launcher_inside_a_launcher(fails, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    message = fails([*arguments(), "--num_processes", "2"])
    assert "--num_processes 2: expected arguments of" in message


def test_errors_of_a_running_training(fails, monkeypatch):
    def train(*_, **__):
        raise error

    monkeypatch.setattr(cli.GRPOTrainer, "train", train)
    for error in (
        CheckpointError("disk full"),
        RewardError("broken"),
        ServerError("gone"),
        ImportError("bitsandbytes"),
        PermissionError(13, "no", "out/a"),
    ):
        assert str(error) in fails(arguments())
    error = ValueError("of another package")
    with pytest.raises(ValueError, match="of another package"):
        main(arguments())


@pytest.mark.parametrize("name", ["model_name_or_path", "dataset_name", "reward_funcs"])
def test_a_hub_that_does_not_answer_is_asked_once(fails, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked again"))
    assert "'owner/name' cannot be loaded: " in fails(arguments(**{name: "owner/name"}))
    assert not constants.HF_HUB_OFFLINE


SERVED = ["serve", "--model", "m"]
EVERYWHERE = ("0.0.0.0", "10.0.0.1", "::")
# words -> what is said with no VLLM_API_KEY, and without the package that is needed
COMMANDS = [
    (arguments(reward_funcs="accuracy_reward"), "math-verify"),
    ([*SERVED, "--host", "gpu-node", "--api-key", ""], "--host gpu-node: expected VLLM_API_KEY"),
    (SERVED, "vllm is not installed"),
    (["report"], "arguments are required: RUN"),
    (["report", "."], "expected the folder of a run, with run.json"),
    *(([*SERVED, "--host", host], f"--host {host}: expected VLLM_API_KEY") for host in EVERYWHERE),
]


@pytest.mark.parametrize(("words", "message"), COMMANDS, ids=str)
def test_without_a_package_or_a_key(fails, monkeypatch, words, message):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert message in fails(words)
    if words == SERVED:  # that front end has no middleware
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
        assert "VLLM_USE_RUST_FRONTEND: expected 0" in fails(SERVED)
