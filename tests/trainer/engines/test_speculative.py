"""Drafters of vLLM: what is checked, warned of, counted and logged."""

from __future__ import annotations

import logging

import pytest
from accelerate import Accelerator

from grpo_trainer import GRPOConfig
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.engines import EngineContext
from grpo_trainer.vllm import speculative
from grpo_trainer.vllm.speculative import (
    Counts,
    Speculation,
    check_server_speculation,
    counts_of_server,
    with_speculation,
)

SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
EAGLE = {"method": "eagle3", "model": "path/to/head", "num_speculative_tokens": 3}
# as vLLM 0.32 writes it, of a server with two engines
SERVED = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="path/to model"} 4.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="path/to model"} 3.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="path/to model"} 1.796e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="path/to model"} 8.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="path/to model"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="path/to model"} 5.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="path/to model"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0
"""


@pytest.fixture
def make_context(tmp_path):
    def make(**changes) -> EngineContext:
        args = GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, use_vllm=True, bf16=False, **changes
        )
        tokenizer = make_tokenizer()
        model = make_policy(tokenizer, seed=0)
        return EngineContext(
            policy=lambda: model,
            processing_class=tokenizer,
            args=args,
            accelerator=Accelerator(cpu=True),
        )

    return make


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, SUFFIX | {"rejection_sample_method": "synthetic"}, "rejection_sample_method"),
        (
            {"min_p": 0.1},
            SUFFIX,
            "min_p: expected None or 0, since vLLM .* with vllm_engine_kwargs",
        ),
        ({"generation_kwargs": {"logit_bias": {3: 1.0}}}, SUFFIX, r"\['logit_bias'\]"),
        ({}, "suffix", "expected a dictionary, got 'suffix'"),
        ({}, {"method": "mtp"}, "expected a 'model'.*for the method 'mtp' the policy's"),
        ({}, {"method": "draft_model", "model": "small"}, "another method than 'draft_model'"),
        ({}, {"model": "small"}, "another method than 'draft_model'.*got None"),
    ],
)
def test_what_cannot_work(make_context, changes, config, message):
    own = {"speculative_config": config}
    with pytest.raises(ValueError, match=message):
        with_speculation(make_context(**changes), own, loads_weights=False)


def test_a_drafter_loads_its_weights(make_context):
    """Also where those of the policy come from the trainer, and vLLM has load_format='dummy'."""
    context = make_context()

    def settings(config, loads_weights=False, **own):
        own = own | {"speculative_config": config}
        return with_speculation(context, own, loads_weights=loads_weights)

    assert settings(EAGLE)["speculative_config"] == EAGLE | {
        "draft_load_config": {"load_format": "auto"}
    }
    assert settings(SUFFIX) == {"speculative_config": SUFFIX, "disable_log_stats": False}
    small = {"method": "draft_model", "model": "small"}
    assert settings(small, loads_weights=True)["speculative_config"] == small
    assert settings(SUFFIX, disable_log_stats=True)["disable_log_stats"] is True
    assert settings(None, seed=1) == {"seed": 1, "speculative_config": None}


def test_weights_that_go_stale(make_context, caplog):
    for config, warnings in ((SUFFIX, 0), (EAGLE, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            own = {"speculative_config": config}
            with_speculation(make_context(), own, loads_weights=False)
        said = [r.getMessage() for r in caplog.records if r.name == speculative.__name__]
        assert len(said) == warnings
        assert all("eagle3, path/to/head" in text for text in said)


def test_a_server_on_a_cpu(make_context):
    server = {"speculative_config": SUFFIX, "device_config": {"device": "cuda"}}
    check_server_speculation(make_context(), server)
    server["device_config"]["device"] = "cpu"
    with pytest.raises(ValueError, match="the server's --speculative-config: expected none"):
        check_server_speculation(make_context(), server)


def test_what_is_logged(monkeypatch):
    logged = []
    monkeypatch.setattr(
        speculative, "log_value", lambda name, value, count: logged.append((name, value, count))
    )
    counted = [counts_of_server(SERVED), Counts(10, 32, 11), Counts(2, 6, 1)]  # restarted
    assert counted[0] == Counts(drafts=7, draft_tokens=20, accepted_tokens=5)
    remaining = iter(counted)
    speculation = Speculation(lambda: next(remaining))
    for _ in counted[1:]:
        speculation.log()
    rate, length = "sampling/draft_acceptance_rate", "sampling/draft_accepted_length"
    assert logged == [
        (rate, 6, 12), (length, 6, 3), (rate, 1, 6), (length, 1, 2)
    ]  # fmt: skip
    Speculation(None).log()
    assert len(logged) == 4
