"""The Python blocks of README and docs run as they stand; their commands and lists are true."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import operator
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import grpo_trainer
from grpo_kernels import LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.backends.choice import BACKENDS
from grpo_kernels.linear_logprobs import BOUNDED, OUTPUTS
from grpo_kernels.losses import LOSSES, NamedLoss
from grpo_kernels.losses.terms import AGGREGATIONS, CORRECTION_MODES, KL_ESTIMATORS
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.cli.serve import serve_command
from grpo_trainer.cli.train import parse
from grpo_trainer.config.checks import OLD_NAMES
from grpo_trainer.data import load_prompts
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.engines.sampler import ENGINES
from grpo_trainer.experience.comparisons import rloo
from grpo_trainer.report.page import report_arguments
from grpo_trainer.rewards import BUILTIN_REWARDS, resolve_rewards
from tests.hf.test_families import FAMILIES
from tests.support.documents import (
    DOCS,
    README,
    ROOT,
    B,
    D,
    L,
    V,
    batch_names,
    block,
    blocks,
    code,
    make_model,
    python_block,
    run_block,
    section,
    with_settings,
)
from tests.support.vllm_stub import StubServer

# what stands in the place of a user's own arguments, and makes a run tiny
TINY = (
    'output_dir="out", max_steps=1, logging_steps=1, max_completion_length=4, use_cpu=True, '
    'report_to="none"'
)

_LINK = re.compile(r"\]\(([^)#]+)\)")


def commands(text: str) -> list[list[str]]:
    """Return the words of each ``grpo-train`` command."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words[:1] == ["grpo-train"]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the files that the documents name."""
    write_policy(tmp_path / "path" / "to" / "model", seed=0)
    rows = [{"prompt": f"{n:03d}=", "answer": f"{n}"} for n in range(100, 116)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "run.yaml").write_text(block(DOCS, "yaml", "soft_punish_cache"))
    (tmp_path / "gsm8k.yaml").write_text(block(DOCS, "yaml", "gsm8k"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(params=["text", "messages"])
def kinds(request: pytest.FixtureRequest, folder: Path) -> str:
    """Put prompts of either kind into the folder."""
    if request.param == "messages":
        rows = [
            {"prompt": [{"role": "user", "content": f"{n}="}], "answer": f"{n}"} for n in range(9)
        ]
        (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (folder / "path/to/model/chat_template.jinja").write_text(template)
    return request.param


@pytest.fixture
def names() -> dict[str, Any]:
    """Return what the blocks of kernels take as given."""
    weight = torch.randn(V, D, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    shared = batch_names()
    ids, advantages = shared["completion_ids"], shared["advantages"]
    return shared | {
        "TokenBatch": TokenBatch,
        "linear_policy_loss": linear_policy_loss,
        "target": ids,
        "mask_ids": torch.randint(-1, V, (B, L, 3)),
        "G": 2,
        "mask": torch.ones(B, L),
        "lengths": [L] * B,
        "active_lengths": [L, L, L, 0],
        "ref_logprobs": -torch.rand(B, L),
        "logits": torch.randn(B, L, V, requires_grad=True),
        "hidden": torch.randn(B, L, D),
        "weight": weight,
        "lm_head": SimpleNamespace(weight=weight),
        "teacher_hidden": torch.randn(B, L, 8),
        "teacher_weight": torch.randn(V, 8),
        "vocab_size": V,
        "lora_a": torch.nn.Linear(D, 3, bias=False),
        "lora_b": torch.nn.Linear(3, V, bias=False),
        "alpha": 6,
        "rank": 3,
        "batch": TokenBatch.from_padded(ids, advantages),
        "config": LossConfig(),
        "scaler": torch.amp.GradScaler("cpu"),
    }


@pytest.mark.parametrize(
    ("text", "parts", "left"),
    [
        (README, ["FusedLinearGRPOLoss("], "model.lm_head.weight"),
        (DOCS, [" policy_loss("], "logits"),
        (DOCS, ["SamplingMask, explain_logprobs"], None),
        (DOCS, ["linear_divergence("], "lm_head.weight"),
        (DOCS, ["warm_up("], None),
        (DOCS, ["HeadLoRA("], "lora_b.weight"),
        (DOCS, ["active_lengths=", "main_grad="], "weight"),
        (DOCS, ['LossConfig(loss_type="dppo_tv")'], None),
        (DOCS, ["prompt_tokens = "], None),
        (DOCS, ["plan.fingerprint"], None),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else "",
)
def test_kernels(names: dict[str, Any], text: str, parts: list[str], left: str | None) -> None:
    for part in parts:
        exec(python_block(text, part), names)
    if "HeadLoRA(" in parts:
        names["loss"].backward()
    if left is not None:
        assert operator.attrgetter(left)(SimpleNamespace(**names)).grad.any()
    if hasattr(names.get("out"), "masked_logprobs"):
        assert (names["out"].masked_logprobs <= 0).all()


def test_which_backward(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = torch.empty(4096, 896, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(151936, 896, dtype=torch.bfloat16, requires_grad=True)
    run_block(DOCS, "Bounded(", hidden=hidden, weight=weight)
    (said,) = blocks(section(DOCS, "Choosing a backward mode"), "text")
    assert capsys.readouterr().out == said


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_sequences_over_several_ranks(names: dict[str, Any], group: dist.ProcessGroup) -> None:
    names |= {
        "input_ids": torch.randint(0, 50, (10,)),
        "cu_seqlens": torch.tensor([0, 4, 10]),
        "completion_mask": torch.ones(10),
        "advantages": torch.tensor([1.0, -1.0]),
        "old_logprobs": -torch.rand(10),
        "run_model": torch.nn.Embedding(50, 16),
        "config": LossConfig(loss_type="gspo"),
        "cp_group": group,
    }
    names = run_block(DOCS, "sequence_group=", **names)
    assert names["loss"].isfinite() and names["weight"].grad.any()


def test_sharded_heads(names: dict[str, Any], group: dist.ProcessGroup) -> None:
    ids, own = names["input_ids"], names["model"].lm_head.weight
    names["batch"] = TokenBatch.from_padded(ids[:, 1:], names["advantages"])
    names |= {"teacher_hidden": torch.randn(*ids[:, 1:].shape, 8)}
    names |= {"teacher_weight": torch.randn(len(own), 8)}
    names = run_block(DOCS, "import FusedHead", **names)
    assert names["distilled"] > 0
    right = names["logits"].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(names["logprobs"], right)
    shard = run_block(DOCS, "import VocabShard", **names | {"weight": own, "tp_group": group})
    torch.testing.assert_close(shard["loss"], names["loss"])
    assert names["model"].lm_head.weight is own


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedLoss]:
    """Register the loss in the docs' block on a loss of one's own."""
    (tmp_path / "own_loss.py").write_text(python_block(DOCS, "class PowerClip"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_loss")
    assert module.config.surrogate == module.PowerClip(power=2.0)
    yield LOSSES.pop("power_clip")
    del sys.modules["own_loss"]


def test_trainer(kinds: str) -> None:
    names = run_block(README, "GRPOTrainer(", TINY)
    assert names["trainer"].state.global_step == 1
    names |= {"dataset": load_prompts("prompts.jsonl")}
    judged = run_block(DOCS, "async def judged", TINY.replace('"out"', '"other"'), **names)
    judged["trainer"].train()
    assert "judged/best" in judged["trainer"].state.log_history[0]


def test_getting_started(kinds: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_block(DOCS, "def hidden_states()")
    assert len(re.findall(r"^loss [+-]", capsys.readouterr().out, re.M)) == 2
    script = with_settings(python_block(DOCS, "fused.enable()"), TINY)
    names: dict[str, Any] = {}
    try:
        exec(script, names)
    finally:
        names["fused"].disable()
    assert names["trainer"].state.global_step == 1
    right = run_block(DOCS, "def right(")["right"]
    completions = ["12 ", [{"role": "assistant", "content": "12"}], "13"]
    assert right(completions, answer=["12"] * 3) == [1, 1, 0]


def test_training_from_python(kinds: str) -> None:
    trainer = run_block(DOCS, "def distinct", TINY)["trainer"]
    assert trainer.state.log_history[0]["reward"] > 0


def test_new_tokens(folder: Path) -> None:
    pytest.importorskip("peft")
    names = run_block(DOCS, "trainable_token_indices=", TINY)
    trainer, new = names["trainer"], names["new"]
    assert trainer.state.global_step == 1 and trainer.model.config.vocab_size == new[-1] + 1
    trained = [x for name, x in trainer.model.named_parameters() if "tokens_delta" in name]
    assert [len(rows) for rows in trained] == [2, 2] and all(x.requires_grad for x in trained)


def test_several_datasets(folder: Path) -> None:
    for name in ("sums", "words"):
        rows = [{"prompt": f"{n}=", "answer": name, name: n} for n in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    trainer = run_block(DOCS, "interleave_datasets(", TINY)["trainer"]
    assert trainer.state.global_step == 1 and len(trainer.eval_dataset) > 0
    sums = trainer.train_dataset["answer"].count("sums")
    assert 0.5 < sums / len(trainer.train_dataset) < 0.9


def test_an_engine_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_trainer.engines.sampler.ENGINES", dict(ENGINES))
    names = run_block(DOCS, "register_rollout_engine(", TINY)
    trainer = GRPOTrainer(
        model="path/to/model",
        reward_funcs=lambda completions, **columns: [float(text == "42") for text in completions],
        args=names["args"],
        train_dataset=load_prompts("prompts.jsonl"),
    )
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 1


def test_an_advantage_of_ones_own() -> None:
    given = dict.fromkeys(["model", "reward", "args", "dataset"])
    names = run_block(DOCS, "def leave_one_out", GRPOTrainer=SimpleNamespace, **given)
    compared = torch.tensor([[1.0, 0.5], [0.0, 1.0], [2.0, 0.0], [4.0, 0.5]]), torch.ones(2), 2
    torch.testing.assert_close(names["trainer"].advantages(*compared), rloo(*compared).float())


def test_run_file(folder: Path) -> None:
    run, args = parse(["--config", "run.yaml", "--use_cpu"])
    assert (args.loss_type, args.epsilon_high, args.learning_rate) == ("dapo", 0.28, 1e-6)
    assert run.reward_funcs and len(resolve_rewards(run.reward_funcs)) == 2


@pytest.mark.parametrize(
    "words", [*commands(README), *commands(DOCS)], ids=lambda words: " ".join(words)
)
def test_commands(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, own_loss: NamedLoss
) -> None:
    if words[0] == "serve":
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert "path/to/model" in serve_command(words[1:])[0]
        return
    if words[0] == "report":
        assert report_arguments(words[1:]).runs[0] == Path("out-file")
        return
    if "--use_peft" in words:
        pytest.importorskip("peft")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the working directory
    monkeypatch.setitem(LOSSES, "my_loss", own_loss)
    monkeypatch.setitem(sys.modules, "my_package.losses", ModuleType("losses"))
    run, args = parse([*words, "--use_cpu"])
    assert run.model_name_or_path in ("path/to/model", "Qwen/Qwen3-0.6B")
    assert args.output_dir.startswith("out-")


def test_runs_of_the_pages_do_not_meet_in_one_folder() -> None:
    """Who follows them in one folder would be told that a run is there."""
    text = "\n".join(blocks(f"{README}\n{DOCS}", r"(?:python|yaml|bash)"))
    folders = re.findall(r"output_dir(?:=\"|: | )(out[\w-]*)", text)
    assert len(folders) > 10 and len(set(folders)) == len(folders), folders


def test_lists_are_complete() -> None:
    losses = section(DOCS, "Which losses")
    rows = [row for row in losses.splitlines() if row.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == set(LOSSES)
    assert {*OUTPUTS, *BOUNDED} <= code(section(DOCS, "Log-probabilities"))
    assert set(BUILTIN_REWARDS) <= code(section(DOCS, "Rewards"))
    assert set(OLD_NAMES) <= code(section(DOCS, "Runs from files"))
    assert set(BACKENDS) <= code(section(DOCS, "Backends"))
    families = section(DOCS, "Models").partition("\n> ")[2].partition("\n\n")[0]
    assert set(re.findall(r"\w+", families)) == set(FAMILIES)


def test_losses_have_the_settings_that_are_listed() -> None:
    listed: dict[str, dict[str, str]] = {}
    right: dict[str, dict[str, str]] = {}
    for row in section(DOCS, "Settings of each loss").splitlines():
        names, _, settings = row[1:].partition("|")
        for name in re.findall(r"`(\w+)`", names) if row.startswith("|") else ():
            listed[name] = dict(re.findall(r"`(\w+)=([^`]+)`", settings))
    for name, loss in LOSSES.items():
        right[name] = {item.name: repr(item.default) for item in fields(loss.surrogate)}
    assert listed == right
    own = {item.name: repr(item.default) for item in fields(LossConfig) if item.init}
    rows = re.findall(r"^\| `(\w+)=(.+?)` \|", section(DOCS, "Settings of every loss"), re.M)
    assert dict(rows) == {name: value for name, value in own.items() if name != "surrogate"}
    for heading, names in (
        ("Which losses", LOSSES),
        ("Aggregations", AGGREGATIONS),
        ("Correction for the engine", CORRECTION_MODES),
        ("KL penalty", KL_ESTIMATORS),
    ):
        assert set(names) <= code(section(DOCS, heading))


def test_links_lead_somewhere() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    links = [(page, link) for page in pages for link in _LINK.findall(page.read_text())]
    local = [(page, link) for page, link in links if "://" not in link]
    assert [link for page, link in local if not (page.parent / link).exists()] == []


def test_what_scripts_for_trl_import_is_here_and_there() -> None:
    trl = pytest.importorskip("trl")
    text = section(DOCS, "Scripts written for TRL")
    named = code(text.partition("and the rewards of")[0]) - {"trl"}
    named -= {"grpo_trainer", "VLLMClient"}  # theirs is deeper inside
    assert len(named) > 5
    assert [
        name for name in named if not hasattr(trl, name) or not hasattr(grpo_trainer, name)
    ] == []
    script = Path(trl.__file__).parent / "scripts" / "grpo.py"  # theirs of the command line
    imports = [x for x in ast.walk(ast.parse(script.read_text())) if isinstance(x, ast.ImportFrom)]
    of_theirs = [x for x in imports if (x.module or "").partition(".")[0] == "trl"]
    assert len(of_theirs) > 2
    for node in of_theirs:
        ours = importlib.import_module(str(node.module).replace("trl", "grpo_trainer", 1))
        mixtures = {"DatasetMixtureConfig", "get_dataset"}  # the docs have a recipe instead
        names = {each.name for each in node.names} - mixtures
        assert [name for name in names if not hasattr(ours, name)] == []


def test_settings_are_fields() -> None:
    """Every setting with an underscore that the docs name by a prefix of ours exists."""
    prefixes = ("vllm_", "use_", "ref_model_", "max_", "sync_", "router_", "dynamic_", "cast_")
    prefixes += ("activation_",)
    named = {name for name in code(DOCS) if name.startswith(prefixes)}
    known = set(GRPOConfig.__dataclass_fields__) | {"use_peft"} | set(OUTPUTS)
    known |= set(inspect.signature(linear_policy_loss).parameters)
    of_others = {"use_kl_loss", "use_entropy_loss", "vllm_is_ratio", "max_new_tokens"}
    of_others |= {"use_transformers_continuous_batching", "vllm_importance_sampling_cap"}
    of_others |= {"max_lora_rank", "max_concurrent_envs", "max_trajectory_age_steps"}
    assert named - known == of_others


def test_the_client_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = StubServer()
    client = python_block(DOCS, "VLLMClient(")
    namespace: dict[str, Any] = {"model": make_model(0)}
    exec(client.replace("http://127.0.0.1:8000", server.url), namespace)
    assert len(namespace["answer"]["completion_ids"]) == 8
    assert server.loaded
    namespace["client"].close()
    server.close()


def test_a_script_for_trl(monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--output_dir", "out", "--lora_r", "8", "--use_peft"]
    )
    names = run_block(DOCS, "TrlParser(")
    assert names["model_args"].lora_r == 8 and names["training_args"].output_dir == "out"
