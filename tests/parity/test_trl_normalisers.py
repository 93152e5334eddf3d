"""What the sums are divided by: accumulation, steps per generation, processes, evaluation."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from tests.parity.compare import assert_parity, config, hidden_states, our_losses, token_batch
from tests.parity.test_trl_losses import LOSS_TYPES
from tests.parity.trl_driver import Trl

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("steps", ((1, 2), (4, 2), (3, 5)), ids="ga{0[0]}-spg{0[1]}".format)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulation(trl: Trl, loss_type: str, steps: tuple[int, int]) -> None:
    loss = config(loss_type=loss_type, beta=0.1, entropy_coef=0.03)
    generated, _ = trl.generate(loss)
    trl.accumulate(*steps)
    for inputs in trl.split(generated):
        assert_parity(trl, inputs, loss)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_evaluation(trl: Trl, loss_type: str) -> None:
    """An evaluation batch is neither split nor accumulated."""
    loss = config(loss_type=loss_type, beta=0.1, entropy_coef=0.03)
    generated, _ = trl.generate(loss, training=False)
    trl.accumulate(4, 2)
    assert_parity(trl, generated, loss, training=False)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_several_processes(trl: Trl, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism averages gradients, so the token-sum losses divide by items per process."""
    loss = config(loss_type=loss_type)
    generated, _ = trl.generate(loss)
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 4))
    assert_parity(trl, trl.split(generated)[0], loss)


@pytest.mark.parametrize("loss_type", ("dapo", "cispo", "vespo"))
def test_less_than_one_item_per_window(trl: Trl, loss_type: str) -> None:
    """Few tokens shared by many steps: the normaliser is a fraction, not 1."""
    loss = config(loss_type=loss_type)
    generated, _ = trl.generate(loss)
    inputs = trl.split(generated)[0]
    inputs["num_items_in_batch"] = torch.tensor(1)
    trl.accumulate(1, 4)
    assert_parity(trl, inputs, loss)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_learn_from(trl: Trl, loss_type: str) -> None:
    """A micro-batch that is masked completely: no loss and no gradient, in both."""
    loss = config(loss_type=loss_type, beta=0.1, entropy_coef=0.03, top_entropy_quantile=0.5)
    generated, _ = trl.generate(loss)
    inputs = trl.split(generated)[0]
    inputs["tool_mask"] = torch.zeros_like(inputs["tool_mask"])
    theirs, _ = trl.loss(inputs, loss)
    assert theirs.item() == 0
    hidden, weight = hidden_states(trl, inputs).detach(), trl.model.lm_head.weight
    hidden.requires_grad_()
    for output in our_losses(hidden, weight, token_batch(trl, inputs), loss).values():
        assert output.loss.item() == 0
        gradients = torch.autograd.grad(output.loss, (hidden, weight))
        assert all(not bool(gradient.any()) for gradient in gradients)
        # TRL logs 0 for a mean over nothing; ours says that there was nothing to average
        assert bool(output.metrics["entropy"].isnan())
