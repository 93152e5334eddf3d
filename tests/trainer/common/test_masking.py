"""Tokens and passwords among the settings: used, but neither written nor printed."""

from __future__ import annotations

import copy
import json
import pickle
import re
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from grpo_trainer import GRPOTrainer
from grpo_trainer.checkpoint.files import SETTINGS_FILE, StartError
from grpo_trainer.checkpoint.resuming import _check_settings, settings_of
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.masking import is_secret, masked

PRIVATE = "hf_private"
URL = f"http://user:{PRIVATE}@127.0.0.1:8000?key={PRIVATE}&{PRIVATE}#{PRIVATE}"
NAMES = (
    "token", "hub_token", "hftoken", "SESSION_TOKEN", "sas_token", "token_2", "auth_tokens",
    "key", "API-key", "X-Api-Key", "xApiKey", "APIKey", "openai_key", "AWS_SECRET_ACCESS_KEY",
    "private_key", "private_key_pem", "api_keys", "my_secret", "pwd", "db_pwd", "PGPASSWORD",
    "passphrase", "credentials", "auth", "basic_auth", "Authorization", "auth_headers",
    "bearer", "Cookie", "Set-Cookie", "session", "session_id", "sas", "jwt",
)  # fmt: skip
# names of settings that say nothing secret
OTHER_NAMES = (
    "max_key_tokens", "keyword", "tokenizer", "eos_token", "pad_token", "image_token",
    "num_experts_per_token", "tokens", "keys", "max_tokens", "key_cache_dtype", "sort_key",
    "prompt_key", "prng_key", "headers", "author", "authority", "compass", "monkey",
    "cookies_enabled", "num_key_value_heads", "session_timeout", "oauth_url",
)  # fmt: skip

SECRETS = st.sampled_from(NAMES)
HARMLESS = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text("ab/:@ ", max_size=6)
ANYTHING = st.recursive(
    st.sampled_from([PRIVATE, 12345, URL]),
    lambda each: (
        st.lists(each, max_size=3)
        | st.tuples(each)
        | st.dictionaries(st.text("ab"), each, max_size=3)
    ),
)
SETTINGS = st.recursive(
    HARMLESS | st.just(URL) | st.dictionaries(SECRETS, ANYTHING, min_size=1, max_size=2),
    lambda each: (
        st.lists(each, max_size=3)
        | st.tuples(each)
        | st.dictionaries(st.text("ab"), each, max_size=3)
    ),
)


OTHERS = st.recursive(
    HARMLESS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text("ab"), each, max_size=3),
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(SETTINGS, OTHERS)
def test_wherever_a_secret_stands_it_is_masked(value, other):
    """And nothing else is, whatever it is called."""
    for named in (True, False):
        found = masked(value, named=named)
        assert PRIVATE not in repr(found) and "12345" not in repr(found)
        assert masked(found, named=named) == found
    kept = {**dict.fromkeys(OTHER_NAMES, "x=y"), "use_auth_token": True, "hub_token": None}
    assert masked(kept | {"other": other}) == kept | {"other": other}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret@bucket/a.json", "s3://***@bucket/a.json"),
        (
            "'https://a.com/x?X-Amz-Signature=ab%2Fc==&Expires=1', b",
            "'https://a.com/x?X-Amz-Signature=***&Expires=***', b",
        ),
        ("hf://datasets/me/it@main/a=b.json", "hf://datasets/me/it@main/a=b.json"),
        ("Authorization: Bearer abc.def-123==", "Authorization: Bearer ***"),
        ("Server=db;Password=abc; --api-key=abc", "Server=db;Password=***; --api-key=***"),
    ],
)
def test_secrets_in_a_text(text, shown):
    assert masked({"name": [text]}) == {"name": [shown]}


def test_no_field_of_others_is_a_secret(make_args, policy):
    """Of the settings here only one is, and none of transformers' or PEFT's."""
    adapter = pytest.importorskip("peft").LoraConfig()
    others = [adapter.to_dict(), policy.config.to_dict(), vars(GenerationConfig())]
    names = set(vars(make_args())).union(*others)
    assert {name for name in names if is_secret(name)} == {"hub_token"}


SECRET_SETTINGS = {
    "hub_token": PRIVATE,
    "model_init_kwargs": {"token": PRIVATE},
    "chat_template_kwargs": {"more": [{"api_key": PRIVATE, "place": f"a={URL}"}], "key": PRIVATE},
    "vllm_engine_kwargs": {"auth": [PRIVATE], "headers": {"Cookie": PRIVATE}, "pwd": PRIVATE},
    "vllm_server_base_url": URL,
}


def telling(folder: str | Path) -> list[Path]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [path for path in files if PRIVATE.encode() in path.read_bytes()]


def test_what_a_run_leaves(make_args, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", PRIVATE)
    made, done, tokens = RepoUrl("https://huggingface.co/me/mine"), Future(), []
    done.set_result(None)
    monkeypatch.setattr(HfApi, "create_repo", lambda *args, **kwargs: made)

    def upload(api: HfApi, folder_path: str, token: str | None = None, **given) -> Future:
        assert not telling(folder_path)
        tokens.append(token)
        return done

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    write_policy(tmp_path / "model", seed=0)
    changes = SECRET_SETTINGS | {"push_to_hub": True, "log_completions": True}
    changes |= {"write_report": True, "save_strategy": "steps", "save_steps": 1}
    changes |= {"run_name": f"with token={PRIVATE}"}

    def run(resume: bool) -> GRPOTrainer:
        args = make_args(max_steps=1 + resume, lr_scheduler_type="constant", **changes)
        trainer = GRPOTrainer(str(tmp_path / "model"), digits_reversal_reward, args, dataset)
        trainer.recipe = replace(trainer.recipe, dataset=URL)  # a signed one
        trainer.recipe.hooks["teacher"] = URL
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run(resume=False)
    trainer = run(resume=True)
    trainer.save_model()
    assert len(tokens) >= 3 and set(tokens) == {PRIVATE}
    output = Path(trainer.args.output_dir)
    pickles = list(output.rglob(TRAINING_ARGS_NAME))
    assert len(pickles) == 3 and (output / "run.json").exists() and not telling(output)
    for path in pickles:
        loaded = torch.load(path, weights_only=False)
        assert loaded.hub_token is None and loaded.model_init_kwargs == {"token": None}
        assert loaded.learning_rate == 1e-2 and loaded.vllm_server_base_url != URL
    assert PRIVATE not in str(trainer.model.config.to_dict())  # which trackers are given as well
    assert trainer.args.hub_token == PRIVATE


def test_a_checkpoint_of_a_version_that_masked_less(make_trainer, tmp_path):
    kwargs = {"key": PRIVATE, "level": 1}
    trainer = make_trainer(chat_template_kwargs=kwargs)
    (tmp_path / TRAINER_STATE_NAME).write_text('{"max_steps": 2}')
    for level in (1, 2):
        written = {"chat_template_kwargs": kwargs | {"level": level}}
        (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings_of(trainer) | written))
        refused = nullcontext() if level == 1 else pytest.raises(StartError, match="'level': 2")
        with refused as error:
            _check_settings(tmp_path, trainer.args, settings_of(trainer), 2)
        assert level == 1 or PRIVATE not in str(error.value)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_a_copy_can_be_used(make_args, copied):
    args = copied(make_args(**SECRET_SETTINGS))
    for text in (str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
        assert PRIVATE not in text and "api_key" in text
    assert {name: getattr(args, name) for name in SECRET_SETTINGS} == SECRET_SETTINGS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_init_kwargs": f'{{"token": "{PRIVATE}",}}'}, "expected JSON, got '{\"token..."),
        ({"model_init_kwargs": f' {{"token": "{PRIVATE}"}}'}, "got ' {\"token..."),
        ({"vllm_server_base_url": f"user:{PRIVATE}@host:80"}, "got '***@host:80'"),
        ({"vllm_server_base_url": f"http://a:{PRIVATE}@h:99999"}, "got 'http://***@h:99999'"),
        ({"vllm_server_base_url": f"host:80?key={PRIVATE}"}, "got 'host:80?***'"),
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
