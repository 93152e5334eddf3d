"""The guides to other loops and trainers: their blocks run, both halves of a diff do the same."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel

from grpo_kernels import FusedHead
from grpo_kernels.hf import TOKEN_WISE_MLPS
from grpo_kernels.integrations import trl_head as our_trl
from grpo_trainer import cli
from grpo_trainer.cli.train import parse
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.policy.tiled_mlp import _Tiled
from tests.support import documents
from tests.support.documents import (
    ROOT,
    D,
    P,
    V,
    batch_names,
    block,
    blocks,
    run_block,
    section,
    with_settings,
)

# what stands in the place of a user's own arguments of TRL, and makes a run tiny
TINY = (
    'output_dir="out", max_steps=1, logging_steps=1, max_completion_length=4, use_cpu=True, '
    'bf16=False, save_strategy="no", report_to="none"'
)


def page(name: str) -> str:
    return (ROOT / "docs" / "guides" / f"{name}.md").read_text()


def halves(diff: str) -> list[str]:
    """Return the code before and after a diff."""
    lines = diff.splitlines()
    return ["\n".join(x[1:] for x in lines if x[0] in marks) for marks in (" -", " +")]


@pytest.fixture
def names() -> dict[str, Any]:
    return batch_names()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the gradients, and take them from the model."""
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def run(code: str, names: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    exec(code, names)
    return names["loss"].detach(), gradients(names["model"])


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set what torchrun sets; the group that is made of it is ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    yield
    dist.destroy_process_group()


def test_a_loop_of_ones_own(
    names: dict[str, Any], under_torchrun: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the page from top to bottom: the loss stays that of the eager loop."""
    text = page("plain-loop")
    (diff,) = blocks(text, "diff")
    before, after = halves(diff)
    eager = run(before, names)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= eager[1].keys()
    torch.testing.assert_close(run(after, names), eager)
    assert names["metrics"]["clip_ratio/region_mean"] > 0
    theirs = names["old_logprobs"]
    sampled, reference, packed, plan, accumulated, processes, check = blocks(text, "python")
    exec(sampled, names)
    exec(check, names)
    torch.testing.assert_close(names["old_logprobs"], names["theirs"])
    names["old_logprobs"] = theirs
    exec(reference, names)
    assert (names["ref_logprobs"] - names["theirs"]).abs().mean() > 0.1
    exec(packed, names | _packed())
    exec(plan, names)
    assert "schedule" in capsys.readouterr().out
    for code in (accumulated, processes):
        loss, found = run(code, names)
        torch.testing.assert_close(found, eager[1])
    torch.testing.assert_close(loss, eager[0])


def _packed() -> dict[str, Any]:
    ids = torch.randint(0, V, (10,))
    return {
        "packed_ids": ids,
        "cu_seqlens": torch.tensor([0, 4, 10]),
        "packed_mask": torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 1]),
        "packed_advantages": torch.tensor([1.0, -1.0]),
        "packed_old": -torch.rand(10),
        "run_packed": lambda ids, cu_seqlens: torch.nn.Embedding(V, D)(ids),
    }


def test_from_liger(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel.chunked_loss")
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # which theirs does by default
    model = names["model"]
    hidden = model.model(names["input_ids"]).last_hidden_state[:, P - 1 : -1]
    names["ref_logprobs"] = names["old_logprobs"] + 0.1
    (diff,) = blocks(page("liger"), "diff")
    theirs, ours = (run(code, names | {"hidden": hidden.detach()}) for code in halves(diff))
    torch.testing.assert_close(ours, theirs)
    assert theirs[1]["lm_head.weight"].any()


def test_a_script_that_scores_tokens(names: dict[str, Any]) -> None:
    (diff,) = blocks(page("other-trainers"), "diff")
    before, after = halves(diff)
    exec(before, names)
    theirs = names["logprobs"]
    exec(after, names)
    assert isinstance(names["model"].lm_head, FusedHead)
    torch.testing.assert_close(names["logprobs"], theirs)


def train(code: str) -> dict[str, float]:
    """Return what one step of a trainer logs."""
    names = {
        "dataset": Dataset.from_dict({"prompt": [f"{n}=" for n in range(10, 18)]}),
        "reward": lambda completions, **_: [float(len(set(text))) for text in completions],
    }
    exec(with_settings(code, TINY), names)
    log: dict[str, float] = names["trainer"].state.log_history[0]  # type: ignore[attr-defined]
    return {name: log[name] for name in ("reward", "reward_std", "loss", "grad_norm", "entropy")}


def test_from_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    write_policy(tmp_path / "path" / "to" / "model", seed=0)
    monkeypatch.chdir(tmp_path)
    enabled, at_the_head = (halves(diff) for diff in blocks(page("trl"), "diff"))
    try:
        ours = train(enabled[1])
        assert our_trl.SWITCH.on
    finally:
        our_trl.disable()
    theirs = train(enabled[0])
    assert enabled[0].split() == at_the_head[0].split()
    assert theirs["reward_std"] > 0
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert train(at_the_head[1]) == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_optimizer_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    write_policy(tmp_path / "path" / "to" / "model", seed=0)
    monkeypatch.chdir(tmp_path)
    (settings,) = blocks(page("optimizers"), "yaml")
    (tmp_path / "run.yaml").write_text(settings)
    _, args = parse(
        ["--config", "run.yaml", "--dataset_name", "x", "--reward_funcs", "x", "--use_cpu"]
    )
    assert args.optim == "adamw_torch_8bit" and args.model_init_kwargs == {"dtype": "bfloat16"}
    (code,) = blocks(page("optimizers"), "python")
    init = 'model_init_kwargs={"dtype": "bfloat16"}'
    assert init in code
    with torch.compiler.set_stance("force_eager"):
        assert train(code)["grad_norm"] > 0


def test_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script writes prompts and grades; the settings train, with a tiny model for Qwen3's."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": f"How much is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(8)
    ]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_list(rows))
    (script,) = blocks(page("real-model"), "python")
    names = {"__name__": "__main__"}
    exec(script, names)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    written = [json.loads(line) for line in Path("gsm8k.jsonl").read_text().splitlines()]
    assert written[3]["prompt"][0]["content"].startswith("How much is 3 + 1?\n")
    said = ["#### 4", "First #### 3, no: #### $4.00", "4", "#### four", "#### 1,004", "#### -4"]
    answers = ["x #### 4"] * 4 + ["#### 1004", "#### 4"]
    assert names["correct"](said, answer=answers) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]

    Path("gsm8k.py").write_text(script)
    Path("gsm8k.yaml").write_text(block(page("real-model"), "yaml", "gsm8k"))
    write_policy(Path("model"), seed=0)
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained("model")
    changed = {
        "model_name_or_path": "model", "use_vllm": False, "max_steps": 1, "use_cpu": True,
        "per_device_train_batch_size": 8, "max_completion_length": 4, "max_prompt_length": 60,
        "bf16": False, "save_strategy": "no", "disable_tqdm": True, "write_report": False,
    }  # fmt: skip
    run, args = parse(["--config", "gsm8k.yaml"])
    assert args.use_vllm and args.vllm_mode == "colocate" and run.reward_funcs == ["gsm8k.correct"]
    words = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    cli.main(["--config", "gsm8k.yaml", *words])
    history = json.loads(Path("out-gsm8k/trainer_state.json").read_text())["log_history"]
    assert history[0]["step"] == 1 and "rewards/correct/mean" in history[0]


def test_long_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example trains with tiled MLPs, the settings exist, the list of classes is the code's."""
    text = page("long-sequences")
    settings = f'output_dir="{tmp_path}", use_cpu=True, disable_tqdm=True, save_strategy="no"'
    trainer = run_block(text, "mlp_tile_tokens=16", settings)["trainer"]
    mlp = trainer.model.model.layers[0].mlp
    assert isinstance(mlp, _Tiled) and mlp.tile_tokens == 16
    assert trainer.state.global_step == 2
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    files = blocks(text, "yaml")
    assert len(files) == 3
    for file in files:
        (tmp_path / "run.yaml").write_text(file)
        needed = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "x"]
        parse([*needed, "--config", str(tmp_path / "run.yaml"), "--use_cpu"])
    classes = documents.code(section(text, "Supported models")) - {"mlp"}
    assert classes == set(TOKEN_WISE_MLPS)
