"""What others wrote does no harm: checkpoints, models, datasets, servers, completions.

SECURITY.md says the same in words, each with a test.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.checkpoint.files import write_manifest
from grpo_trainer.data import encode_prompts
from grpo_trainer.vllm import ServerError, VLLMClient
from grpo_trainer.vllm.transfer import FileTransfer
from tests.support.vllm_stub import StubServer

ROOT = Path(__file__).parents[2]


class Attack:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


@pytest.fixture
def mark(tmp_path) -> Iterator[Path]:
    """Return the file that code of others would leave; at the end there is none."""
    path = tmp_path / "code was run"
    pickle.loads(pickle.dumps(Attack(path)))
    assert path.exists()  # or the attack would prove nothing
    path.unlink()
    yield path
    assert not path.exists()


@pytest.fixture
def model_folder(policy, tokenizer, tmp_path) -> Path:
    folder = tmp_path / "model"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_checkpoint_runs_no_code(make_trainer, policy, mark, tmp_path) -> None:
    start = {name: value.clone() for name, value in policy.state_dict().items()}
    settings: dict[str, Any] = dict(save_strategy="steps", save_steps=1)
    make_trainer(**settings, max_steps=1, lr_scheduler_type="constant").train()
    whole = tmp_path / "out" / "checkpoint-1"
    pickles = [path.name for path in whole.iterdir() if path.suffix in (".pt", ".pth", ".bin")]
    assert {"optimizer.pt", "rng_state.pth", "training_args.bin", "shared_state.pt"} <= {*pickles}
    for name in pickles:
        policy.load_state_dict(start)
        folder = tmp_path / name / "checkpoint-1"
        shutil.copytree(whole, folder)
        torch.save(Attack(mark), folder / name)
        write_manifest(folder)  # as whoever wrote the file would
        trainer = make_trainer(
            **settings, lr_scheduler_type="constant", output_dir=str(tmp_path / f"to {name}")
        )
        if name == "training_args.bin":  # which nobody reads
            trainer.train(resume_from_checkpoint=folder)
            assert trainer.state.global_step == 2
            continue
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            trainer.train(resume_from_checkpoint=folder)
        assert not mark.exists(), name


def test_pickled_weights_run_no_code(make_trainer, model_folder, mark) -> None:
    (model_folder / "model.safetensors").unlink()
    torch.save(Attack(mark), model_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded: Weights only load failed"):
        make_trainer(model=str(model_folder))


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_model_is_not_run(make_trainer, model_folder, mark, config) -> None:
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (model_folder / "evil.py").write_text(code)
    path = model_folder / config
    kind, name = ("AutoConfig", "evil.A"), ("AutoTokenizer", ["evil.A", "evil.A"])
    classes = dict(
        [kind, ("AutoModelForCausalLM", "evil.A")] if config == "config.json" else [name]
    )
    content = json.loads(path.read_text()) | {"auto_map": classes}
    content |= {"model_type": "evil"} if config == "config.json" else {"tokenizer_class": "Evil"}
    path.write_text(json.dumps(content))
    with suppress(ValueError):  # a tokenizer of a known class serves in place of the named one
        make_trainer(model=str(model_folder), processing_class=None)


def test_a_chat_template_is_in_a_sandbox(chat_tokenizer) -> None:
    messages = [[{"role": "user", "content": "1"}]]
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ):
        chat_tokenizer.chat_template = template
        with pytest.raises(ValueError, match="chat template fails"):
            encode_prompts(messages, chat_tokenizer)


def test_text_of_rows_is_no_template(chat_tokenizer) -> None:
    text = "{{ 7 * 7 }}{% set a = 1 %}"
    [encoded] = encode_prompts([[{"role": "user", "content": text}]], chat_tokenizer)
    [expected] = encode_prompts([f"{text}="], chat_tokenizer)
    assert encoded.ids == expected.ids


class Redirect(BaseHTTPRequestHandler):
    """Leads elsewhere."""

    def __init__(self, to: str, *args: Any) -> None:
        self._to = to
        super().__init__(*args)

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", self._to + self.path)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


def test_a_server_cannot_pass_on_the_api_key() -> None:
    thief = StubServer()
    server = HTTPServer(("127.0.0.1", 0), functools.partial(Redirect, thief.url))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(ServerError, match="got 302"):
            VLLMClient(f"http://127.0.0.1:{server.server_address[1]}", api_key="secret")
        assert thief.asked == []
    finally:
        server.shutdown()
        server.server_close()
        thief.close()


def test_what_a_server_says_does_not_command_the_terminal() -> None:
    server = StubServer()
    server.script["/health"] = [(400, b"\x1b]0;title\x07\xc2\x9b8m\xe2\x80\xae")]
    try:
        with pytest.raises(ServerError) as error:
            VLLMClient(server.url)
        assert str(error.value).isprintable() and "title" in str(error.value)
    finally:
        server.close()


def test_weights_on_the_way_to_a_server_are_the_users_own(tmp_path) -> None:
    FileTransfer(tmp_path / "weights", timeout=1.0)
    [folder] = (tmp_path / "weights").iterdir()
    assert folder.stat().st_mode & 0o077 == 0


def test_every_line_names_a_test() -> None:
    """Those of SECURITY.md; a link may name a file of tests, or one of its functions."""
    text = (ROOT / "SECURITY.md").read_text()
    held = text.partition("## Protections")[2].partition("\n## ")[0]
    items = re.split(r"^\* ", held, flags=re.MULTILINE)[1:]
    assert len(items) > 10
    for item in items:
        links = re.findall(r"\]\((tests/[^)#]+\.py)(?:#(\w+))?\)", item)
        assert links, item
        for path, name in links:
            assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)
