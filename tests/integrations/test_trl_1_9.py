"""TRL from before its fused head: its Liger loss and its scorers, with theirs and with ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integrations.hosts import need

need("trl_1_9")

from grpo_kernels.integrations import lazy_hosts, lazy_logits, liger
from tests.integrations import trl_cases as cases
from tests.integrations.precision import assert_run_as_exact_as

# Liger's layers are Triton kernels without an interpreter
_NO_LAYERS = dict.fromkeys(
    ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False
)
LIGER: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "temperature": 0.7, "epsilon_high": 0.3, "num_iterations": 2},
    "bnpo": {"loss_type": "bnpo", "importance_sampling_level": "sequence", "beta": 0.0},
    "dr_grpo": {"loss_type": "dr_grpo", "delta": 1.5, "use_bias_correction_kl": True},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}
LAZY: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (cases._grpo, {}),
    "entropy bonus": (cases._grpo, {"entropy_coef": 0.1, "temperature": 0.7}),
    "off-policy": (cases._grpo, {"num_iterations": 2, "loss_type": "dr_grpo"}),
    "few tokens": (cases._grpo, {"top_entropy_quantile": 0.5, "loss_type": "cispo"}),
    "rloo": (cases._rloo, {}),
}


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # Liger compiles its module
        yield


@pytest.mark.parametrize("name", LIGER)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_the_loss_of_liger(name: str) -> None:
    more = {**LIGER[name], "use_liger_kernel": True, "liger_kernel_config": _NO_LAYERS}
    expected = cases._train(cases._grpo, **more)
    with liger.enabled():
        trainer = cases._build(cases._grpo, **more)
    assert type(trainer.liger_loss) is liger.LigerFusedLinearGRPOLoss
    cases._compare(cases.run(trainer), expected)
    assert cases._train(cases._grpo, **more)[0] == expected[0]  # off again without a trace


@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_liger_in_its_default_precision() -> None:
    more = {"use_liger_kernel": True, "liger_kernel_config": _NO_LAYERS}
    with cases.canned_completions():
        exact = cases._train(cases._grpo, **more)
        theirs = cases._train(cases._grpo, **more, **cases.DEFAULT)
        with liger.enabled():
            found = cases._train(cases._grpo, **more, **cases.DEFAULT)
    assert_run_as_exact_as(found, theirs, exact)


@pytest.mark.filterwarnings("ignore")
def test_logits_that_are_not_formed_in_its_default_precision() -> None:
    with cases.canned_completions():
        exact, theirs = cases._train(cases._grpo), cases._train(cases._grpo, **cases.DEFAULT)
        trainer = cases._build(cases._grpo, **cases.DEFAULT)
        models = [trainer.model, trainer.ref_model]
        for model in models:
            lazy_hosts.enable(model, "trl")
        found = cases.run(trainer)
        for model in models:
            lazy_hosts.disable(model)
    assert_run_as_exact_as(found, theirs, exact)


@pytest.mark.parametrize("name", LAZY)
def test_logits_that_are_not_formed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, more = LAZY[name]
    expected = cases._train(make, **more)
    form = lazy_logits.Recipe.logits

    def of_next_tokens(self: Any) -> torch.Tensor:
        assert self.hidden.shape[-2] == 1  # while sampling
        return form(self)

    monkeypatch.setattr(lazy_logits.Recipe, "logits", of_next_tokens)
    trainer = cases._build(make, **more)
    models = [x for x in (trainer.model, trainer.ref_model) if x is not None]
    for model in models:
        lazy_hosts.enable(model, "trl")
    cases._compare(cases.run(trainer), expected)
    for model in models:
        lazy_hosts.disable(model)
    assert not lazy_hosts.SWITCHES["trl"].on
    assert cases._train(make, **more)[0] == expected[0]  # off again without a trace
