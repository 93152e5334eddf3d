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
from grpo_trainer.rollout import ServerError
from tests.trainer.cli.runs import a_judge, arguments, write_module


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


RESUMED = "out/checkpoint-3"
# changes of a run's arguments -> what is said before anything is loaded
EARLY = [
    ({"model_name_or_path": None}, "--model_name_or_path is required"),
    ({"dataset_name": None}, "--dataset_name is required"),
    ({"model_name_or_path": "./missing"}, "--model_name_or_path: no folder './missing'"),
    ({"model_name_or_path": "a/b/model"}, "--model_name_or_path: no folder 'a/b/model'"),
    ({"model_name_or_path": RESUMED}, f"--model_name_or_path: no folder '{RESUMED}'"),
    ({"model_name_or_path": "checkpoint-3"}, "--model_name_or_path: no folder 'checkpoint-3'"),
    ({"num_generations": 3}, "num_generations: expected a divisor"),
    ({"learning_rate": "fast"}, "argument --learning_rate"),
    ({"accelerator_config": '{"batches": 1}'}, "accelerator_config: expected one of split_batches"),
    ({"dtype": "int8"}, "argument --dtype"),
    (
        {"dtype": "bfloat16", "model_init_kwargs": '{"dtype": "float16"}'},
        "dtype: expected it once, got 'bfloat16' and 'float16' in model_init_kwargs",
    ),
    ({"ignore_bias_buffers": True}, "ignore_bias_buffers: expected False"),
    ({"test_split_size": 3}, "test_split_size: expected it with datasets"),
    ({"streaming": True}, "streaming: expected it with datasets"),
    ({"loss_type": "squared"}, "loss_type: expected one of"),
    ({"loss_kwargs": '{"epsilom": 2}'}, "epsilom: expected a setting of dapo"),
    ({"loss_kwargs": "[2]"}, "loss_kwargs: expected"),
    ({"import_modules": "nothing"}, "--import_modules: module 'nothing' cannot be imported"),
    ({"output_dir": "taken"}, "--output_dir: expected a folder, got 'taken': taken is a file"),
    ({"output_dir": "taken/out"}, "--output_dir: expected a folder, got 'taken/out': taken is a f"),
    ({"output_dir": "model"}, "of another run, got 'model' with config.json; choose ano"),
    ({"resume_from_checkpoint": RESUMED}, f"expected a folder, got '{RESUMED}'"),
    ({"resume_from_checkpoint": "true"}, "a checkpoint in output_dir 'out', got none"),
    ({"report_to": "swanlab"}, "report_to: expected trackers that are installed"),
    ({"accelerate_config": "zero4"}, "accelerate_config: expected a file, or one of fsdp2, multi_"),
]
# words, after those of a run -> what is said, before anything is loaded too
WORDS = [
    *(
        ([wrong, "1"], "there is no such argument (is it learning_rate?)")
        for wrong in ("--learning_rat", "--learning-rat", "--learning_rat=1")
    ),
    (["--num_proc", "2"], "--num_proc: there is no such argument"),
    (["more"], "expected --name value, got 'more'"),
    (["--config", "no.yaml"], "no such file 'no.yaml'"),
    (["--config", "unknown.yaml"], "unknown.yaml has an unknown argument: learning_rat"),
    (["--config", "tagged.yaml"], "tagged.yaml: seed cannot be read"),
]
# changes -> what is said when data, rewards and the model are loaded
LATE = [
    ({"dataset_name": "rows.jsonl", "dataset_streaming": True, "max_steps": -1}, "max_steps: exp"),
    ({"dataset_name": "missing.jsonl"}, "dataset 'missing.jsonl': no such file"),
    ({"dataset_name": "./missing"}, "dataset './missing': no such folder"),
    ({"dataset_name": "missing/hub-dataset"}, "'missing/hub-dataset' cannot be loaded"),
    ({"dataset_name": "other.csv"}, "`prompt`"),
    ({"dataset_name": "hostile.csv"}, "got columns \\x1b[2Jquestion"),
    ({"dataset_name": "empty.jsonl"}, "dataset 'empty.jsonl': expected rows, got an empty file"),
    ({"dataset_name": "broken.jsonl"}, "JSON parse error"),
    ({"dataset_name": "deep.jsonl"}, "it is nested too deep"),
    ({"dataset_name": "broken.csv"}, "Error tokenizing data"),
    ({"dataset_name": "broken.parquet"}, "Parquet"),
    ({"dataset_name": "no_token.jsonl"}, "expected at least one token"),
    ({"dataset_name": "long.jsonl"}, "expected at most 60 tokens"),
    ({"reward_funcs": "no_such_reward"}, "reward_funcs: expected"),
    ({"reward_funcs": "nothing.here"}, "module 'nothing'"),
    ({"reward_funcs": "judge"}, "1 label"),
    ({"model_name_or_path": "missing/hub-model"}, "'missing/hub-model' cannot be loaded"),
    ({"model_name_or_path": "folder"}, "no config.json"),
    ({"model_name_or_path": "damaged"}, "model 'damaged' cannot be loaded"),
    ({"model_name_or_path": "mute"}, "processing_class: expected a tokenizer"),
    ({"model_init_kwargs": '{"dtype": "int8"}'}, "model_init_kwargs['dtype']: expected auto or a"),
    ({"model_init_kwargs": '{"nothing": 1}'}, "model_init_kwargs: expected known names: "),
]
MODULES = {
    "syntax": ("def reward(:", "SyntaxError: invalid syntax (syntax.py, line 1)"),
    "unbound": ("x = 1\ny = z", "NameError: name 'z' is not defined (unbound.py, line 2)"),
    "needs": ("import not_there", "No module named 'not_there' (needs.py, line 1)"),
    "script": ("raise SystemExit(0)", "SystemExit: 0 (script.py, line 1)"),
}


@pytest.fixture(scope="module")
def places(a_room, tmp_path_factory) -> Path:
    """Make a working directory with everything that the cases name."""
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(a_room, folder, dirs_exist_ok=True)
    texts = {
        "taken": "",
        "unknown.yaml": "learning_rat: 1\n",
        "tagged.yaml": "seed: !!python/object/apply:os.getpid []\n",
        "other.csv": "question,answer\n1=,1\n",
        "hostile.csv": "\x1b[2Jquestion,answer\n1=,1\n",
        "empty.jsonl": "",
        "broken.jsonl": '{"prompt": "1="}\n{"prompt"',
        "deep.jsonl": f'{{"prompt": {"[" * 3000}{"]" * 3000}}}',
        "broken.csv": 'prompt\n"1=',
        "broken.parquet": "PAR",
        "no_token.jsonl": json.dumps({"prompt": "", "answer": "1"}),
        "long.jsonl": json.dumps({"prompt": "1" * 100, "answer": "1"}),
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


@pytest.mark.parametrize(("words", "message"), WORDS, ids=str)
def test_words(places, fails, monkeypatch, words, message):
    monkeypatch.chdir(places)
    monkeypatch.setattr(cli, "GRPOTrainer", None)
    assert message in fails([*arguments(), *words])


@pytest.mark.parametrize(("changes", "message"), LATE, ids=str)
def test_while_it_is_loaded(places, fails, monkeypatch, changes, message):
    monkeypatch.chdir(places)
    assert message in fails(arguments(**changes))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("argument", ["reward_funcs", "tools", "import_modules"])
def test_modules_that_fail(fails, name, argument):
    text, message = MODULES[name]
    write_module(name, text)
    value = name if argument == "import_modules" else f"{name}.reward"
    failure = fails(arguments(**{argument: value}))
    assert f"{argument}: module '{name}' cannot be imported: " in failure and message in failure


def test_a_server_that_is_not_there(fails):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        message = fails(
            arguments(
                use_vllm=True, vllm_mode="server", vllm_server_port=port, vllm_server_timeout=0.01
            )
        )
    assert "no connection" in message and "`grpo-train serve --model" in message


def test_a_launcher_inside_a_launcher(fails, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    message = fails([*arguments(), "--num_processes", "2"])
    assert "--num_processes 2: expected no arguments of" in message


@pytest.mark.parametrize(
    ("error", "one_line"),
    [
        (CheckpointError("disk full"), True),
        (ServerError("gone"), True),
        (ImportError("bitsandbytes"), True),
        (PermissionError(13, "Permission denied", "out/table"), True),
        (OSError("of no file"), False),
        (ValueError("of another package"), False),
        (RuntimeError("a reward function raised"), False),
    ],
)
def test_errors_of_a_running_training(fails, monkeypatch, error, one_line):
    def train(self, **_):
        raise error

    monkeypatch.setattr(cli.GRPOTrainer, "train", train)
    if one_line:
        assert str(error) in fails(arguments())
        return
    with pytest.raises(type(error)) as raised:
        main(arguments())
    assert raised.value is error


def test_a_reward_that_needs_a_package(fails, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "math-verify" in fails(arguments(reward_funcs="accuracy_reward"))


@pytest.mark.parametrize("name", ["model_name_or_path", "dataset_name", "reward_funcs"])
def test_a_hub_that_does_not_answer_is_asked_once(fails, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked again"))
    assert "'owner/name' cannot be loaded: " in fails(arguments(**{name: "owner/name"}))
    assert not constants.HF_HUB_OFFLINE


SERVED = ["serve", "--model", "m"]
# words of another command -> what it says, with no VLLM_API_KEY
COMMANDS = [
    (["serve"], "--model"),
    ([*SERVED, "--host", "gpu-node", "--api-key", ""], "--host gpu-node: expected VLLM_API_KEY"),
    (SERVED, "vllm is not installed"),
    (["report"], "arguments are required: RUN"),
    (["report", "."], "expected the folder of a run, with run.json"),
    *(
        ([*SERVED, "--host", host], f"--host {host}: expected VLLM_API_KEY to be set")
        for host in ("0.0.0.0", "10.0.0.1", "::", "gpu-node")
    ),
]


@pytest.mark.parametrize(("words", "message"), COMMANDS, ids=str)
def test_other_commands(fails, monkeypatch, words, message):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert message in fails(words)


def test_a_front_end_without_middleware(fails, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "VLLM_USE_RUST_FRONTEND: expected 0" in fails(SERVED)
