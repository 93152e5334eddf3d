"""Tokens and passwords among the settings: used, but neither written nor printed."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from transformers.trainer import TRAINING_ARGS_NAME

from grpo_trainer import GRPOTrainer
from grpo_trainer.common import masked
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import digits_reversal_reward

PRIVATE = "hf_private"
URL = f"http://user:{PRIVATE}@127.0.0.1:8000"


def test_what_is_masked():
    settings = {
        "token": PRIVATE,
        "nested": {"Authorization": PRIVATE, "API-key": PRIVATE, "all": [{"my_secret": PRIVATE}]},
        "password": 1234,
        "url": URL,
        "beta": 0.1,
        "max_tokens": 5,
        "tokenizer": "a folder",
        "use_auth_token": True,
        "hub_token": None,
    }
    before = copy.deepcopy(settings)
    assert masked(settings) == settings | {
        "token": "<TOKEN>",
        "nested": {
            "Authorization": "<AUTHORIZATION>",
            "API-key": "<API-KEY>",
            "all": [{"my_secret": "<MY_SECRET>"}],
        },
        "password": "<PASSWORD>",
        "url": "http://***@127.0.0.1:8000",
    }
    assert settings == before


def test_settings_as_text(make_args):
    kwargs = {"token": PRIVATE, "revision": "main"}
    args = make_args(
        model_init_kwargs=kwargs,
        hub_token=PRIVATE,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=URL,
    )
    for text in (str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
        assert PRIVATE not in text and "revision" in text
    assert args.model_init_kwargs == kwargs and args.vllm_server_base_url == URL


def test_what_a_run_leaves(make_args, dataset, tmp_path):
    write_policy(tmp_path / "model", seed=0)
    args = make_args(
        max_steps=1, write_report=True, save_strategy="steps", model_init_kwargs={"token": PRIVATE}
    )
    trainer = GRPOTrainer(str(tmp_path / "model"), digits_reversal_reward, args, dataset)
    trainer.train()
    trainer.save_model()
    files = [path for path in Path(args.output_dir).rglob("*") if path.is_file()]
    assert {"run.json", "README.md"} <= {path.name for path in files}
    telling = {path.name for path in files if PRIVATE.encode() in path.read_bytes()}
    assert telling <= {TRAINING_ARGS_NAME}  # transformers' own pickle of the settings
    assert PRIVATE not in str(trainer.model.config.to_dict())  # which trackers are given as well


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_init_kwargs": f'{{"token": "{PRIVATE}",}}'}, "expected JSON, got '{\"token..."),
        ({"model_init_kwargs": f' {{"token": "{PRIVATE}"}}'}, "got ' {\"token..."),
        ({"vllm_server_base_url": f"user:{PRIVATE}@host:80"}, "got '***@host:80'"),
        ({"vllm_server_base_url": f"{URL}0000"}, "got 'http://***@127.0.0.1:80000000'"),
        ({"vllm_server_base_url": f"http://user:{PRIVATE}/@host:80"}, "got 'http://***@host:80'"),
    ],
)
def test_errors(make_args, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_args(use_vllm=True, vllm_mode="server", **changes)
    assert PRIVATE not in str(error.value)


def test_a_warning_with_a_model_instance(make_trainer):
    with pytest.warns(UserWarning, match=r"model_init_kwargs: .*, got {'token\.\.\.$"):
        make_trainer(model_init_kwargs={"token": PRIVATE})
