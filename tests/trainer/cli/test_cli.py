from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import Qwen3ForSequenceClassification

from grpo_kernels.losses import LOSSES
from grpo_trainer import GRPOConfig
from grpo_trainer.checkpoint import CheckpointError
from grpo_trainer.cli import train as cli
from grpo_trainer.config import loss_config
from grpo_trainer.demo.policy import make_policy, make_tokenizer, write_policy
from grpo_trainer.rewards import accuracy
from grpo_trainer.rollout import ServerError

REWARD = "grpo_trainer.demo.task.digits_reversal_reward"


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def model(tmp_path):
    write_policy(tmp_path / "model", seed=0)
    return "model"


def arguments(model: str, dataset: str, reward: str = REWARD, **changes) -> list[str]:
    options = {
        "model_name_or_path": model,
        "dataset_name": dataset,
        "reward_funcs": reward,
        "output_dir": "out",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
    } | changes
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def write(dataset: Dataset, name: str) -> str:
    writers = {"csv": dataset.to_csv, "parquet": dataset.to_parquet}
    kind = name.rpartition(".")[2]
    if kind == "json":
        Path(name).write_text(json.dumps(list(dataset)))
    else:
        writers.get(kind, dataset.to_json)(name)
    return name


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_dataset_files(model, dataset, name):
    # CSV has no types: an answer like 012 would come back as a number
    file = write(dataset.remove_columns("answer"), name)
    cli.main(arguments(model, file, "think_format_reward", eval_dataset_name=name))
    history = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    assert any("reward" in row for row in history)


def test_a_mixture_of_datasets(model, dataset, capsys):
    for name in ("a.jsonl", "b.jsonl"):
        write(dataset, name)
    Path("run.yaml").write_text(
        "datasets:\n  - {path: a.jsonl, fraction: 0.75}\n  - {path: b.jsonl, fraction: 0.25}\n"
        "test_split_size: 4\neval_strategy: steps\n"
    )
    words = arguments(model, "unused")
    del words[2:4]  # dataset_name
    trainer = cli.build_trainer(["--config", "run.yaml", *words])
    assert len(trainer.train_dataset) == 25 + 8 - 4 and len(trainer.eval_dataset) == 4
    assert trainer.recipe.dataset == "a.jsonl, b.jsonl"
    assert "--dataset_name is required" in fails(capsys, words)


def test_what_is_for_mixtures_alone(model, dataset, capsys):
    rows = write(dataset, "rows.jsonl")
    for name, value in (("test_split_size", 3), ("streaming", True)):
        message = fails(capsys, arguments(model, rows, **{name: value}))
        assert f"{name}: expected it with datasets" in message


def test_values_that_look_like_something_else(model, dataset):
    rows = write(dataset, "rows.jsonl")
    Path("run.yaml").write_text(
        "run_name: -foo\nreward_weights: -1e-3\nresume_from_checkpoint: false\n"
    )
    args = cli.parse(["--config", "run.yaml", *arguments(model, rows)])[1]
    assert (args.run_name, args.reward_weights) == ("-foo", [-1e-3])
    assert args.resume_from_checkpoint is None


def test_a_dataset_that_is_read_while_training(model, dataset, capsys):
    rows = write(dataset, "rows.jsonl")
    trainer = cli.build_trainer(arguments(model, rows, dataset_streaming=True))
    assert isinstance(trainer.train_dataset, IterableDataset)
    words = arguments(model, rows, dataset_streaming=True, max_steps=-1)
    assert "max_steps: expected how many steps" in fails(capsys, words)


def test_a_split_for_evaluation(model, dataset):
    Path("data").mkdir()
    for split in ("train", "test"):
        write(dataset.select(range(8 if split == "test" else 24)), f"data/{split}.jsonl")
    changes = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = cli.build_trainer(arguments(model, "data", **changes))
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (24, 8)
    assert cli.build_trainer(arguments(model, "data")).eval_dataset is None


def test_what_rows_of_others_may_open(model, dataset, monkeypatch):
    def allowed(name, **changes):
        args = cli.build_trainer(arguments(model, name, **changes)).args
        return args.allow_remote_images, args.allowed_media_path

    rows = write(dataset, "rows.jsonl")
    assert allowed(rows) == (None, None)
    monkeypatch.setattr("grpo_trainer.cli.train.load_prompts", lambda *given, **options: dataset)
    assert allowed("owner/name") == (False, constants.HF_HUB_CACHE)
    own = {"allow_remote_images": True, "allowed_media_path": "."}
    assert allowed("owner/name", **own) == (True, ".")
    assert allowed(rows, eval_dataset_name="owner/name") == (False, constants.HF_HUB_CACHE)


def test_how_a_model_is_loaded(model, dataset, capsys):
    rows = write(dataset, "rows.jsonl")
    named = {"dtype": "bfloat16", "attn_implementation": "eager", "model_revision": "v2"}
    args = cli.parse(arguments(model, rows, **named))[1]
    assert args.model_init_kwargs == {
        "dtype": "bfloat16",
        "attn_implementation": "eager",
        "revision": "v2",
    }
    trainer = cli.build_trainer(arguments(model, rows, **named))
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    own = {"model_init_kwargs": '{"dtype": "float16", "attn_implementation": "sdpa"}'}
    args = cli.parse(arguments(model, rows, **own))[1]
    assert args.model_init_kwargs == {"dtype": "float16", "attn_implementation": "sdpa"}
    message = fails(capsys, arguments(model, rows, **own, dtype="bfloat16"))
    assert "dtype: expected it once, got 'bfloat16' and 'float16' in model_init_kwargs" in message
    assert "argument --dtype" in fails(capsys, arguments(model, rows, dtype="int8"))
    message = fails(capsys, arguments(model, rows, ignore_bias_buffers=True))
    assert "ignore_bias_buffers: expected False" in message


def test_an_adapter_is_trained_on(model, dataset, capsys):
    pytest.importorskip("peft")
    rows = write(dataset, "rows.jsonl")
    new = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 2}
    cli.main(arguments(model, rows, **new))
    cli.main(arguments("out", rows, output_dir="more", learning_rate=0.1))
    first, second = (load_file(Path(name, "adapter_model.safetensors")) for name in ("out", "more"))
    assert first.keys() == second.keys() and not Path("more", "model.safetensors").exists()
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert "expected None with a PeftModel" in fails(
        capsys, arguments("out", rows, output_dir="again", **new)
    )


def test_a_reward_model_by_its_own_argument(model, dataset):
    judge, rows = a_judge("judge", labels=1), write(dataset, "rows.jsonl")
    named = {"reward_model_name_or_path": judge}
    trainer = cli.build_trainer(arguments(model, rows, "think_format_reward", **named))
    assert trainer.reward_func_names == ["judge", "think_format_reward"]
    alone = arguments(model, rows, "unused", **named)
    del alone[4:6]  # reward_funcs
    assert cli.build_trainer(alone).reward_func_names == ["judge"]


def test_folder_with_splits(model, dataset):
    write(dataset, "train.jsonl")
    Path("data").mkdir()
    Path("train.jsonl").rename("data/train.jsonl")
    trainer = cli.build_trainer(arguments(model, "data"))
    assert len(trainer.train_dataset) == len(dataset)


def test_config_file_and_reward_beside_the_data(model, dataset, tmp_path):
    (tmp_path / "beside.py").write_text(
        "def one(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model}\ndataset_name: {write(dataset, 'rows.jsonl')}\n"
        "reward_funcs: [beside.one, think_format_reward]\nlearning_rate: 1e-3\nnum_generations: 2\n"
        "per_device_train_batch_size: 4\nuse_cpu: true\ngeneration_kwargs: {num_beams: 1}\n"
        "eval_strategy: 'no'\nbeta: 0.5\n"
    )
    trainer = cli.build_trainer(["--config", "run.yaml", "--num_generations", "4"])
    assert trainer.args.num_generations == 4
    assert trainer.args.learning_rate == 1e-3
    assert trainer.args.beta == 0.5
    assert trainer.reward_func_names == ["one", "think_format_reward"]


def test_installed_modules_come_before_those_beside_the_data(tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "a_tracker.py").write_text("WHERE = 'installed'\n")
    monkeypatch.syspath_prepend(installed)
    (tmp_path / "a_tracker.py").write_text("raise RuntimeError('run from the working directory')\n")
    (tmp_path / "my_losses.py").write_text("import a_tracker\n\nWHERE = a_tracker.WHERE\n")
    try:
        cli.parse(arguments("model", "rows.jsonl", import_modules="my_losses"))
        assert sys.modules["my_losses"].WHERE == "installed"
    finally:
        for name in ("a_tracker", "my_losses"):
            sys.modules.pop(name, None)


LOSS_MODULE = """
from dataclasses import dataclass

from grpo_kernels.losses import NamedLoss, Surrogate, register_loss


@dataclass(frozen=True, kw_only=True)
class Powered(Surrogate):
    power: float = 1.0

    def __post_init__(self):
        if self.power <= 0:
            raise ValueError(f"power: expected a number > 0, got {self.power!r}")

    def __call__(self, terms):
        return -terms.ratio**self.power * terms.advantages


register_loss("powered", NamedLoss(surrogate=Powered, aggregation="token_mean", source="a test"))
"""


@pytest.fixture
def own_loss(tmp_path):
    (tmp_path / "my_losses.py").write_text(LOSS_MODULE)
    yield {"import_modules": "my_losses", "loss_type": "powered"}
    LOSSES.pop("powered", None)
    sys.modules.pop("my_losses", None)


def first_step(folder: str) -> dict[str, float]:
    history = json.loads(Path(folder, "trainer_state.json").read_text())["log_history"]
    return {name: history[0][name] for name in ("loss", "grad_norm")}


def test_own_loss_with_a_setting_of_its_own(model, dataset, own_loss):
    rows = write(dataset, "rows.jsonl")
    cli.main(arguments(model, rows, output_dir="1", **own_loss))
    cli.main(arguments(model, rows, output_dir="2", loss_kwargs='{"power": 2}', **own_loss))
    Path("run.yaml").write_text(
        "import_modules: [my_losses]\nloss_type: powered\nloss_kwargs: {power: 2}\n"
    )
    cli.main(["--config", "run.yaml", *arguments(model, rows, output_dir="3")])
    args = GRPOConfig(output_dir="4", use_cpu=True, loss_type="powered", loss_kwargs={"power": 2})
    assert loss_config(args).surrogate.power == 2

    once, twice = first_step("1"), first_step("2")
    assert first_step("3") == twice
    assert once["grad_norm"] > 0
    # the ratio is 1: its square has twice the gradient
    assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-4)


def test_settings_that_a_loss_does_not_have(model, dataset, own_loss, capsys):
    rows = write(dataset, "rows.jsonl")
    for kwargs, message in {
        '{"powre": 2}': "powre",
        '{"power": 0}': "power: expected a number > 0, got 0",
        "[2]": "loss_kwargs",
    }.items():
        assert message in fails(capsys, arguments(model, rows, loss_kwargs=kwargs, **own_loss))


def test_own_loss_that_is_not_there(model, dataset, capsys):
    rows = write(dataset, "rows.jsonl")
    message = fails(capsys, arguments(model, rows, loss_type="squared"))
    assert "loss_type: expected one of" in message and "'squared'" in message
    message = fails(capsys, arguments(model, rows, import_modules="no_such_module"))
    assert "--import_modules: module 'no_such_module' cannot be imported" in message


def test_progress(model, dataset, capsys):
    cli.main(arguments(model, write(dataset, "rows.jsonl"), beta=0.1, disable_tqdm=False))
    shown = capsys.readouterr().err
    assert re.search(r"step 1/1  reward 0\.\d+ ± .*  kl \S+  .* tok/s  .* left", shown)


def test_resuming(model, dataset, capsys):
    rows = write(dataset, "rows.jsonl")
    run = arguments(model, rows, save_strategy="steps", resume_from_checkpoint="true")
    message = fails(capsys, run)
    assert "resume_from_checkpoint: expected a checkpoint in output_dir 'out', got none" in message
    cli.main(run[:-2])
    left = {name: Path("out", name) for name in ("trainer_state.json", "model.safetensors")}
    before = {name: path.read_bytes() for name, path in left.items()}
    left["model.safetensors"].unlink()  # as after a run that was killed while it saved
    cli.main(run)
    assert {name: path.read_bytes() for name, path in left.items()} == before
    (Path("out") / "checkpoint-1" / "scheduler.pt").unlink()
    assert "checkpoint-1 has no scheduler.pt" in fails(capsys, run)


def fails(capsys, argv: list[str]) -> str:
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("grpo-train: error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0]
    return errors[0]


def test_errors_before_loading(capsys, dataset):
    rows = write(dataset, "rows.jsonl")
    assert "--model_name_or_path is required" in fails(capsys, ["--output_dir", "out"])
    assert "no folder './missing'" in fails(capsys, arguments("./missing", rows))
    assert "no folder 'runs/demo/model'" in fails(capsys, arguments("runs/demo/model", rows))
    assert "num_generations" in fails(capsys, arguments("m", rows, num_generations=3))
    assert "--learning_rate" in fails(capsys, arguments("m", rows, learning_rate="fast"))
    for wrong in ("--learning_rat", "--learning-rat", "--learning_rat=1"):
        message = fails(capsys, [*arguments("m", rows), wrong, "1"])
        assert "--learning" in message and "no such argument (is it learning_rate?)" in message
    wrong = arguments("m", rows, accelerator_config='{"batches": 1}')
    assert "accelerator_config: expected one of split_batches" in fails(capsys, wrong)
    assert "expected --name value, got 'more'" in fails(capsys, [*arguments("m", rows), "more"])
    assert "no such file 'no.yaml'" in fails(capsys, ["--config", "no.yaml"])
    Path("bad.yaml").write_text("learning_rat: 1\n")
    assert "learning_rat" in fails(capsys, ["--config", "bad.yaml"])
    assert "seed cannot be read" in fails(capsys, ["--config", tagged("bad.yaml")])
    Path("taken").write_text("")
    for folder in ("taken", "taken/out"):
        message = fails(capsys, arguments("m", rows, output_dir=folder))
        assert f"--output_dir: expected a folder, got '{folder}': taken is a file" in message


def tagged(name: str) -> str:
    Path(name).write_text("seed: !!python/object/apply:os.getpid []\n")
    return name


BROKEN_MODULES = {
    "syntax": ("def reward(:", "SyntaxError: invalid syntax (syntax.py, line 1)"),
    "unknown": ("x = 1\ny = z", "NameError: name 'z' is not defined (unknown.py, line 2)"),
    "needs": ("import not_there", "No module named 'not_there' (needs.py, line 1)"),
    "script": ("raise SystemExit(0)", "SystemExit: 0 (script.py, line 1)"),
}


@pytest.mark.parametrize("name", BROKEN_MODULES)
def test_modules_that_fail(capsys, model, dataset, name):
    text, message = BROKEN_MODULES[name]
    Path(f"{name}.py").write_text(text)
    rows = write(dataset, "rows.jsonl")
    for argument, argv in {
        "reward_funcs": arguments(model, rows, f"{name}.reward"),
        "--tools": arguments(model, rows, tools=f"{name}.reward"),
        "--import_modules": arguments(model, rows, import_modules=name),
    }.items():
        failure = fails(capsys, argv)
        assert f"{argument}: module '{name}' cannot be imported: " in failure
        assert message in failure


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "expected rows, got an empty file"),
        ("broken.jsonl", b'{"prompt": "1="}\n{"prompt"', "JSON parse error"),
        ("deep.jsonl", b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", "it is nested too deep"),
        ("broken.csv", b'prompt\n"1=', "Error tokenizing data"),
        ("broken.parquet", b"PAR", "Parquet"),
    ],
)
def test_files_without_rows(capsys, model, name, content, message):
    Path(name).write_bytes(content)
    failure = fails(capsys, arguments(model, name))
    assert f"dataset '{name}'" in failure and message in failure


def test_errors_in_the_first_step(capsys, model, dataset):
    def of(prompts: list[str]) -> list[str]:
        rows = Dataset.from_list([{"prompt": prompt, "answer": "1"} for prompt in prompts])
        return arguments(model, write(rows, "rows.jsonl"))

    fine, missing = of(["1="] * 4), ["--resume_from_checkpoint", "missing"]
    assert "expected a folder, got 'missing'" in fails(capsys, [*fine, *missing])
    assert "expected at least one token" in fails(capsys, of([""]))
    assert "expected at most 60 tokens" in fails(capsys, of(["1" * 100]))


def test_a_server_that_is_not_there(capsys, model, dataset, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        settings = {"vllm_mode": "server", "vllm_server_port": unused.getsockname()[1]}
        argv = arguments(model, write(dataset, "rows.jsonl"), use_vllm=True, **settings)
        message = fails(capsys, [*argv, "--vllm_server_timeout", "0.01"])
        assert "no connection" in message and "`grpo-train serve --model" in message


def test_a_checkpoint_that_is_not_there(capsys, model, dataset, monkeypatch):
    """Is said before a model is loaded, and nobody looks for it on the hub."""
    monkeypatch.setattr(cli, "GRPOTrainer", None)
    rows = write(dataset, "rows.jsonl")
    capsys.readouterr()
    for name, settings, message in (
        ("out/checkpoint-3", {}, "--model_name_or_path: no folder 'out/checkpoint-3'"),
        ("checkpoint-3", {}, "--model_name_or_path: no folder 'checkpoint-3'"),
        (model, {"resume_from_checkpoint": "out/checkpoint-3"}, "expected a folder, got 'out/che"),
        (model, {"resume_from_checkpoint": "true"}, "a checkpoint in output_dir 'out', got none"),
        (model, {"output_dir": model}, "of another run, got 'model' with config.json; choose ano"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments(name, rows, **settings))
        shown = capsys.readouterr().err
        assert shown.startswith("grpo-train: error: ") and shown.count("\n") == 1
        assert message in shown


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
def test_errors_of_a_running_training(capsys, model, dataset, monkeypatch, error, one_line):
    def train(self, **_):
        raise error

    monkeypatch.setattr(cli.GRPOTrainer, "train", train)
    argv = arguments(model, write(dataset, "rows.jsonl"))
    if one_line:
        assert str(error) in fails(capsys, argv)
        return
    with pytest.raises(type(error)) as raised:
        cli.main(argv)
    assert raised.value is error


def test_errors_of_model_data_and_rewards(capsys, model, dataset):
    rows = write(dataset, "rows.jsonl")
    other = write(dataset.rename_column("prompt", "question"), "other.csv")
    hostile = write(dataset.rename_column("prompt", "\x1b[2Jquestion"), "hostile.csv")
    assert "no such file" in fails(capsys, arguments(model, "missing.jsonl"))
    assert "no such folder" in fails(capsys, arguments(model, "./missing"))
    assert "cannot be loaded" in fails(capsys, arguments(model, "missing/hub-dataset"))
    message = fails(capsys, arguments(model, other))
    assert "`prompt`" in message and "question, answer" in message
    assert "got columns \\x1b[2Jquestion" in fails(capsys, arguments(model, hostile))
    assert "no_such_reward" in fails(capsys, arguments(model, rows, "no_such_reward"))
    assert "module 'nothing'" in fails(capsys, arguments(model, rows, "nothing.here"))
    assert "missing/hub-model" in fails(capsys, arguments("missing/hub-model", rows))
    Path("empty").mkdir()
    assert "no config.json" in fails(capsys, arguments("empty", rows))
    shutil.copytree(model, "broken")
    Path("broken/model.safetensors").write_text("weights")
    assert "model 'broken' cannot be loaded" in fails(capsys, arguments("broken", rows))
    shutil.copytree(model, "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "processing_class: expected a tokenizer" in fails(capsys, arguments("mute", rows))
    for settings, got in (('{"dtype": "int8"}', "'int8'"), ('{"nothing": 1}', "'nothing'")):
        message = fails(capsys, arguments(model, rows, model_init_kwargs=settings))
        assert "model_init_kwargs" in message and got in message
    assert "1 label" in fails(capsys, arguments(model, rows, a_judge("judge", labels=2)))
    assert "report_to" in fails(capsys, arguments(model, rows, report_to="swanlab"))


def a_judge(folder: str, labels: int) -> str:
    tokenizer = make_tokenizer()
    config = make_policy(tokenizer, seed=0).config
    config.num_labels = labels
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_that_needs_a_package(model, dataset, capsys, monkeypatch):
    rows = write(dataset, "rows.jsonl")
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda name: None)
    assert "math-verify" in fails(capsys, arguments(model, rows, "accuracy_reward"))


@pytest.mark.parametrize("name", ["model", "dataset", "reward"])
def test_a_hub_that_does_not_answer_is_asked_once(model, dataset, capsys, monkeypatch, name):
    rows = write(dataset, "rows.jsonl")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked again"))
    given = {"model": model, "dataset": rows, "reward": REWARD} | {name: "owner/name"}
    assert "'owner/name' cannot be loaded: " in fails(capsys, arguments(**given))
    assert not constants.HF_HUB_OFFLINE


def test_help_and_entry_point():
    command = [sys.executable, "-c", "from grpo_trainer.cli import main; main(['--help'])"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage: grpo-train" in done.stdout
    for option in ("--reward_funcs", "--loss_type", "--num_generations", "--config"):
        assert option in done.stdout


def test_serving_by_the_name_that_trl_has(monkeypatch):
    served = []
    monkeypatch.setattr("grpo_trainer.cli.serve.main", served.append)
    for name in ("serve", "vllm-serve"):
        cli.main([name, "--model", "m"])
    assert served == [["--model", "m"]] * 2


@pytest.mark.parametrize("command", ["serve", "report"])
def test_errors_of_subcommands_are_one_line(capsys, command):
    with pytest.raises(SystemExit) as error:
        cli.main([command])
    assert error.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"grpo-train {command}: error: ") and shown.count("\n") == 1
