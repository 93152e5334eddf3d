"""What generated cases have found, one named case each."""

from __future__ import annotations

import pytest

from grpo_kernels import available_backends
from tests.net.cases import Case
from tests.net.checks import check

FINDINGS = {
    "the reference did not round an fp32 weight that autocast multiplies in bf16": Case(
        outputs=("logprobs",), packed=True, depth=16, autocast=True, backend="reference"
    ),
    "torch rows lost the digits of 1 - p beside a target that is nearly certain": Case(
        seed=402,
        loss_type="pg",
        settings={"temperature": 0.6},
        lengths=(5,),
        depth=16,
        vocab=3,
        trained="hidden",
        backend="chunked",
    ),
    "and those of the sum over the vocabulary, through the entropy": Case(
        seed=559,
        loss_type="gmpo",
        settings={"entropy_coef": 0.01, "temperature": 0.6, "rollout_correction_mode": None},
        lengths=(3, 3, 3),
        depth=8,
        vocab=2,
        logits="certain",
        lora=3,
        trained="hidden",
        backend="chunked",
        schedule="two_pass",
    ),
    "the reference lost the digits of a tail that is nearly certain": Case(
        divergence="reverse_kl",
        lengths=(3,),
        packed=True,
        vocab=64,
        trained="hidden",
        top_k=1,
        backend="reference",
    ),
    "the reference lost the digits of probabilities that nearly agree": Case(
        seed=3,
        divergence="jsd",
        settings={"temperature": 0.6},
        lengths=(3,),
        packed=True,
        vocab=31,
        bias=True,
        logit_scale=1.5,
        backend="reference",
    ),
    "a row's bits changed with its place, of an adapter where D is no multiple of 8": Case(
        seed=430,
        outputs=("logprobs",),
        lengths=(23,),
        packed=True,
        depth=33,
        lora=3,
        batch_invariant=True,
        twist="split",
    ),
    "a loss that was traced for Triton in a checkpoint saved tensors there, the first time": Case(
        settings={"epsilon": 0.123}, backend="triton", twist="checkpoint"
    ),
    "NaN in a row without a target reached the adapter's A through a bounded backward": Case(
        outputs=("logprobs",),
        masked=True,
        packed=True,
        lora=1,
        bounded=True,
        twist="garbage_in_masked_rows",
    ),
    "threads as ranks waited for one another in the metrics of a sequence group": Case(
        ranks=2, shared="sequences"
    ),
    "a computed weight stayed in memory from forward to backward": Case(twist="offload"),
    "the hidden states of log-probabilities did, too": Case(
        outputs=("logprobs",), packed=True, twist="offload"
    ),
    "the reference returned fp64 log-probabilities if only the bias was fp64": Case(
        outputs=("logprobs",), packed=True, bias=True, factors="float64", backend="reference"
    ),
    "torch rows gave NaN if all ids of a rank had a bias of -inf": Case(
        outputs=("logprobs",),
        lengths=(1,),
        packed=True,
        vocab=2,
        logits="minus_inf",
        bias=True,
        backend="chunked",
        ranks=2,
    ),
}


@pytest.mark.parametrize("case", FINDINGS.values(), ids=FINDINGS)
def test_it_stays_fixed(case: Case) -> None:
    if case.backend == "triton" and "triton" not in available_backends():
        pytest.skip("no Triton on this machine")
    check(case)
