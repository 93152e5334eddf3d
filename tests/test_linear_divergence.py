"""linear_divergence: generated calls against fp64, and what a caller can get wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_kernels import (
    Head,
    HeadLoRA,
    LinearDivergence,
    Transform,
    VocabShard,
    available_backends,
    explain_divergence,
    linear_divergence,
    linear_logprobs,
)
from grpo_kernels.backends import BACKENDS, KINDS, torch_backend
from grpo_kernels.testing import assert_as_exact_as, poisoned_allocations
from tests.net.ranks import on_ranks
from tests.support.memory import offloaded

ON_CPUS = [name for name in available_backends() if name != "triton"]
FLOOR = {torch.float64: 1e-8, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
LEAST = -1e4


@dataclass(frozen=True)
class Case:
    kind: str = "forward_kl"
    beta: float = 0.5
    backend: str = "auto"
    dtype: str = "float32"
    tokens: int = 21
    depth: int = 24
    teacher_depth: int = 16
    vocab: int = 67
    scale: float = 1.0
    rank: int = 0  # of LoRA; 0: none
    bias: bool = False
    absent: str = ""  # whose ids have logits of -inf, except the first few: "student", "both"
    softcap: float | None = None
    per_row: bool = False  # temperatures
    masked: bool = False
    weighted: bool = False
    top_k: int = 0  # 0: the teacher's logits
    rows: int | None = None  # of both tiles
    trained: tuple[str, ...] = ("hidden", "weight")
    offload: bool = False  # what autograd saves; nothing else may keep the inputs' memory


cases = st.builds(
    Case,
    kind=st.sampled_from(tuple(KINDS)),
    beta=st.sampled_from((0.1, 0.5, 0.9)),
    backend=st.sampled_from(ON_CPUS),
    dtype=st.sampled_from(("float32", "float32", "bfloat16", "float16", "float64")),
    tokens=st.sampled_from((1, 2, 17, 40)),
    depth=st.sampled_from((7, 24, 33)),  # of fewer a gradient is what its terms leave of each other
    teacher_depth=st.sampled_from((1, 16, 40)),
    vocab=st.sampled_from((2, 67, 128, 300)),
    scale=st.sampled_from((0.1, 1.0, 6.0)),
    rank=st.sampled_from((0, 0, 3)),
    bias=st.booleans(),
    absent=st.sampled_from(("", "", "student", "both")),
    softcap=st.sampled_from((None, None, 5.0)),
    per_row=st.booleans(),
    masked=st.booleans(),
    weighted=st.booleans(),
    top_k=st.sampled_from((0, 0, 1, 5)),
    rows=st.sampled_from((None, 5, 16)),
    trained=st.sampled_from((("hidden",), ("weight",), ("hidden", "weight"), ())),
    offload=st.booleans(),
)


class Problem:
    """Tensors of a case, exact in its dtype."""

    def __init__(self, case: Case) -> None:
        self.case, self.dtype = case, getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return x.to(self.dtype)

        spread = case.scale / case.depth**0.5
        self.leaves = {
            "hidden": normal(case.tokens, case.depth),
            "weight": normal(case.vocab, case.depth, scale=spread),
        }
        if case.bias or case.absent:
            self.leaves["bias"] = normal(case.vocab)
        if case.rank:
            self.leaves["a"] = normal(case.rank, case.depth, scale=0.3)
            self.leaves["b"] = normal(case.vocab, case.rank, scale=0.3)
        self.teacher_hidden = normal(case.tokens, case.teacher_depth)
        self.teacher_weight = normal(
            case.vocab, case.teacher_depth, scale=case.scale / case.teacher_depth**0.5
        )
        few, nothing = torch.arange(case.vocab) < 3, torch.zeros(())
        minus_inf = torch.where(few, 0.0, -torch.inf)
        # a softcap makes them finite
        self.absent = minus_inf if case.absent and case.softcap is None else nothing
        self.teacher_absent = minus_inf if case.absent == "both" else nothing
        rand = torch.rand(3, case.tokens, generator=generator, dtype=torch.float64)
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        self.temperature: Any = (0.5 + rand[0]).to(wide) if case.per_row else 0.7
        self.mask = rand[1] > 0.3 if case.masked else None
        self.weights = (rand[2] - 0.2).to(wide) if case.weighted else None
        self.topk = None
        if case.top_k and case.top_k < case.vocab:
            self.topk = self.scores(torch.float64, teacher=True).log_softmax(-1).topk(case.top_k)
            self.topk = self.topk.values.to(wide), self.topk.indices

    @property
    def teacher_bias(self) -> Tensor | None:
        absent = self.teacher_absent
        return absent.to(self.dtype) if absent.dim() else None

    def posed(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the leaves, of which some need a gradient."""
        kinds = {"bias": "weight", "a": "weight", "b": "weight"}
        return {
            name: x.detach().to(dtype).requires_grad_(kinds.get(name, name) in self.case.trained)
            for name, x in self.leaves.items()
        }

    def scores(self, dtype: torch.dtype, teacher: bool = False, **leaves: Tensor) -> Tensor:
        """Return both heads' (T, V) scores by eager ops."""
        per_row = isinstance(self.temperature, Tensor)
        temperature = self.temperature.to(dtype)[:, None] if per_row else self.temperature
        if teacher:
            logits = self.teacher_hidden.to(dtype) @ self.teacher_weight.to(dtype).t()
            return (logits + self.teacher_absent.to(dtype)) / temperature
        logits = leaves["hidden"] @ leaves["weight"].t()
        if "a" in leaves:
            logits = logits + 2.0 * (leaves["hidden"] @ leaves["a"].t()) @ leaves["b"].t()
        if "bias" in leaves:
            logits = logits + leaves["bias"]
        cap = self.case.softcap
        if cap is not None:
            logits = cap * torch.tanh(1.5 * logits / cap)
        return logits / temperature

    def eager(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all results by the formulas, with logits, in ``dtype``."""
        case, leaves = self.case, self.posed(dtype)
        finite = self.scores(dtype, **leaves)
        scores = finite + self.absent.to(dtype)
        lse, teacher = scores.logsumexp(-1), self.scores(dtype, teacher=True).log_softmax(-1)
        # an id of probability 0 counts as one of exp(-1e4)
        logp = at_least(scores.log_softmax(-1), finite - lse[:, None])
        entropy = -(logp.exp() * logp).sum(-1)
        if self.topk is not None:
            values, ids = self.topk[0].to(dtype), self.topk[1]
            rest = scores.scatter(-1, ids, -torch.inf)
            empty = (rest == -torch.inf).all(-1)
            tail = (
                rest.masked_fill(empty[:, None], 0.0).logsumexp(-1).masked_fill(empty, -torch.inf)
            )
            tail = at_least(tail - lse, -lse)
            logp = torch.cat([logp.gather(-1, ids), tail[:, None]], -1)
            left = torch.log1p(-values.double().exp().sum(-1, keepdim=True).clamp(max=1))
            teacher = torch.cat([values, left.to(dtype)], -1)
        teacher = teacher.clamp(min=LEAST)
        s, t = logp.exp(), teacher.exp()
        if case.kind == "forward_kl":
            each = t * (teacher - logp)
        elif case.kind == "reverse_kl":
            each = s * (logp - teacher)
        else:
            middle = ((1 - case.beta) * s + case.beta * t).log()
            each = case.beta * t * (teacher - middle) + (1 - case.beta) * s * (logp - middle)
        divergence = each.sum(-1)
        counted = torch.ones_like(divergence) if self.mask is None else self.mask.to(dtype)
        weights = counted if self.weights is None else counted * self.weights.to(dtype)
        loss = (divergence * weights).sum() / counted.sum().clamp(min=1)
        found = {"loss": loss, "divergence": divergence * counted, "entropy": entropy * counted}
        return self._with_gradients(found, leaves)

    def ours(self, **options: Any) -> dict[str, Tensor]:
        leaves = self.posed(self.dtype)
        teacher = {"teacher_hidden": self.teacher_hidden, "teacher_weight": self.teacher_weight}
        if self.case.offload:
            with offloaded(leaves | teacher) as tensors:
                output = self._call(tensors, options)
        else:
            output = self._call(leaves | teacher, options)
        return self._with_gradients(output._asdict(), leaves)

    def _call(self, leaves: dict[str, Tensor], options: dict[str, Any]) -> LinearDivergence:
        case = self.case
        lora = HeadLoRA(a=leaves["a"], b=leaves["b"], scaling=2.0) if case.rank else None
        cap = case.softcap
        transform = Transform() if cap is None else Transform(1.5, cap)
        bias = leaves["bias"] + self.absent.to(self.dtype) if "bias" in leaves else None
        head = Head(leaves["weight"], bias, transform, lora)
        teacher: dict[str, Any] = {"teacher_topk": self.topk}
        if self.topk is None:
            teacher = {
                "teacher_hidden": leaves["teacher_hidden"],
                "teacher_head": Head(leaves["teacher_weight"], self.teacher_bias),
            }
        if case.rows is not None:
            wide = 8 if case.dtype == "float64" else 4
            tiles = 2 if self.topk is None else 1
            options["max_workspace_bytes"] = tiles * case.rows * case.vocab * wide
        options = {"backend": case.backend, "kind": case.kind, "beta": case.beta, **options}
        return linear_divergence(
            leaves["hidden"],
            head,
            **teacher,
            temperature=self.temperature,
            mask=self.mask,
            weights=self.weights,
            **options,
        )

    @staticmethod
    def _with_gradients(found: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        gradients = torch.autograd.grad(found["loss"] * 3, list(wanted.values())) if wanted else ()
        named = {f"d{name}": x for name, x in zip(wanted, gradients, strict=True)}
        return {name: x.detach() for name, x in (found | named).items()}


def at_least(logp: Tensor, slope: Tensor) -> Tensor:
    """Return ``logp``, or where it is -inf the least one, with the gradient of ``slope``."""
    return torch.where(logp == -torch.inf, LEAST + slope - slope.detach(), logp)


def check(problem: Problem, got: dict[str, Tensor]) -> None:
    dtype = problem.dtype
    exact, eager = (
        problem.eager(torch.float64),
        problem.eager(torch.promote_types(dtype, torch.float32)),
    )
    for name, value in got.items():
        is_gradient = name.startswith("d") and name != "divergence"
        floor = FLOOR[dtype if is_gradient or dtype == torch.float64 else torch.float32]
        size = exact[name].abs().max()
        if size < 1e-6 * problem.case.scale or (dtype == torch.float16 and size < 1e-3):
            assert value.isfinite().all(), name  # nothing but rounding, or near fp16's end
            continue
        # between distributions that are nearly equal the terms cancel, which have this size
        terms = problem.case.scale if name == "dhidden" else 1.0
        floor *= max(1.0, 0.1 * terms / float(size))
        assert_as_exact_as(value, eager[name], exact[name], floor, f"{problem.case} {name}")


@settings(max_examples=250, deadline=None, derandomize=True)
@given(case=cases)
def test_generated_calls(case: Case) -> None:
    if BACKENDS[case.backend].unsuited(torch.device("cpu"), getattr(torch, case.dtype)):
        case = replace(case, backend="chunked")
    problem = Problem(case)
    with poisoned_allocations():
        got = problem.ours()
    check(problem, got)


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton")
@pytest.mark.parametrize("top_k", (0, 4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", ({"softcap": 5.0}, {"absent": "both"}), ids=str)
def test_triton(kind: str, top_k: int, extra: dict[str, Any]) -> None:
    case = Case(kind=kind, backend="triton", tokens=4, masked=True, rank=2, top_k=top_k, **extra)
    check(Problem(case), Problem(case).ours())


@pytest.mark.parametrize("backend", ON_CPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_far_below(kind: str, backend: str) -> None:
    """An id that is 90 logits above the others, and in the teacher's list."""
    problem = Problem(Case(kind=kind, backend=backend, top_k=3, bias=True))
    assert problem.topk is not None
    problem.leaves["bias"][3] += 90
    problem.topk[1][:] = torch.tensor([3, 10, 20])
    check(problem, problem.ours())


@pytest.mark.parametrize("top_k", (0, 5))
@pytest.mark.parametrize("softcap", (None, 5.0))
@pytest.mark.parametrize("backend", ("chunked", "cpu"))
def test_a_row_without_weight_may_be_no_number(
    backend: str, softcap: float | None, top_k: int
) -> None:
    problem = Problem(
        Case(backend=backend, weighted=True, softcap=softcap, top_k=top_k, trained=("hidden",))
    )
    assert problem.weights is not None
    problem.weights[4] = 0
    expected = problem.ours()["dhidden"]
    problem.leaves["hidden"][4] = torch.nan
    assert torch.equal(problem.ours()["dhidden"], expected) and not expected[4].any()


@pytest.mark.parametrize("top_k", (0, 5))
@pytest.mark.parametrize("backend", ("chunked", "cpu"))
@pytest.mark.parametrize("kind", KINDS)
def test_two_shards_of_the_vocabulary(kind: str, backend: str, top_k: int) -> None:
    case = Case(kind=kind, backend=backend, masked=True, rows=5, top_k=top_k)
    problem = Problem(case)
    whole, split = problem.ours(), 40

    def on_rank(rank: int) -> dict[str, Tensor]:
        part = slice(split) if rank == 0 else slice(split, None)
        leaves = problem.posed(torch.float32)
        weight = problem.leaves["weight"][part].detach().requires_grad_()
        teacher_weight = problem.teacher_weight[part]
        shard = VocabShard.of(torch.distributed.group.WORLD, weight)
        teacher: dict[str, Any] = {"teacher_topk": problem.topk}
        if not top_k:
            head = Head(teacher_weight, shard=shard)
            teacher = {"teacher_hidden": problem.teacher_hidden, "teacher_head": head}
        found = linear_divergence(
            leaves["hidden"], Head(weight, shard=shard), **teacher, kind=kind, mask=problem.mask,
            temperature=problem.temperature, backend=backend, max_workspace_bytes=4 * 2 * 300,
        )  # fmt: skip
        (found.loss * 3).backward()
        made = {"dhidden": leaves["hidden"].grad, "dweight": weight.grad}
        return {**found._asdict(), **made}

    ranks = on_ranks(2, on_rank)
    for rank, found in enumerate(ranks):
        part = slice(split) if rank == 0 else slice(split, None)
        expected = {**whole, "dweight": whole["dweight"][part]}
        for name, value in found.items():
            torch.testing.assert_close(value.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_chunk_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory once, the call goes through with smaller tiles, and says what to set."""
    case = Case(backend="chunked", rows=16)
    problem, divergence_sums = Problem(case), torch_backend.Backend.divergence_sums
    expected = problem.ours()

    def fails_at_first(self: Any, pair: Any, divergence: Any) -> Tensor:
        if len(pair.lse) > 8:
            raise torch.OutOfMemoryError("of the test")
        return divergence_sums(self, pair, divergence)

    monkeypatch.setattr(torch_backend.Backend, "divergence_sums", fails_at_first)
    with pytest.warns(RuntimeWarning, match=r"out of memory: a second try.*max_workspace_bytes="):
        found = problem.ours()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("backend", ("chunked", "cpu"))
def test_batch_invariant(backend: str) -> None:
    """A row's bits are its own: those of fewer rows, in another place, without a gradient."""
    problem = Problem(Case(backend=backend, tokens=40, kind="jsd"))
    given = {"batch_invariant": True, "max_workspace_bytes": 2 * 16 * 67 * 4}
    rows = slice(7, 30)
    args = problem.leaves["hidden"], problem.leaves["weight"]
    teacher = problem.teacher_hidden, problem.teacher_weight
    some = linear_divergence(
        args[0][rows], args[1], teacher[0][rows], teacher[1], kind="jsd", temperature=0.7,
        backend=backend, **given,
    )  # fmt: skip
    all_of_them = problem.ours(**given)
    assert torch.equal(some.divergence, all_of_them["divergence"][rows])
    assert torch.equal(some.entropy, all_of_them["entropy"][rows])
    own = linear_logprobs(
        args[0], args[1], torch.zeros(40, dtype=torch.int64), temperature=0.7, backend=backend,
        outputs=("entropy",), batch_invariant=True, max_workspace_bytes=16 * 67 * 4,
    )  # fmt: skip
    torch.testing.assert_close(own.entropy, all_of_them["entropy"], rtol=1e-6, atol=1e-6)


def test_a_second_backward_and_none() -> None:
    problem = Problem(Case())
    leaves = problem.posed(torch.float32)
    out = linear_divergence(
        leaves["hidden"], leaves["weight"], problem.teacher_hidden, problem.teacher_weight
    )
    first = torch.autograd.grad(out.loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(2 * out.loss, list(leaves.values()), retain_graph=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    assert not out.divergence.requires_grad and not out.entropy.requires_grad
    with torch.no_grad():
        leaves["weight"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_padded_vocabularies() -> None:
    problem = Problem(Case())
    hidden, weight = problem.leaves["hidden"], problem.leaves["weight"]
    teacher = problem.teacher_hidden, torch.cat([problem.teacher_weight, torch.full((5, 16), 9.0)])
    expected = linear_divergence(hidden, weight, teacher[0], problem.teacher_weight)
    padded = linear_divergence(hidden, weight, *teacher, vocab_size=67)
    assert torch.equal(padded.divergence, expected.divergence)


def test_layouts_compile_and_no_rows() -> None:
    problem = Problem(Case(tokens=20))
    hidden, weight = problem.leaves["hidden"], problem.leaves["weight"].requires_grad_()
    teacher = problem.teacher_hidden, problem.teacher_weight
    flat = linear_divergence(hidden, weight, *teacher)
    padded = linear_divergence(hidden.view(4, 5, -1), weight, teacher[0].view(4, 5, -1), teacher[1])
    assert torch.equal(padded.divergence.view(-1), flat.divergence)
    compiled = torch.compile(lambda x: linear_divergence(x, weight, *teacher).loss * 2)
    assert torch.equal(compiled(hidden), flat.loss * 2)
    for rows, mask in ((slice(0), None), (slice(None), torch.zeros(20))):
        out = linear_divergence(hidden[rows], weight, teacher[0][rows], teacher[1], mask=mask)
        (gradient,) = torch.autograd.grad(out.loss, [weight])
        assert out.loss == 0 and not gradient.any() and not out.divergence.any()


def test_explain() -> None:
    problem = Problem(Case())
    args = problem.leaves["hidden"].requires_grad_(), problem.leaves["weight"]
    teacher = problem.teacher_hidden, problem.teacher_weight
    plan = explain_divergence(*args, *teacher, kind="jsd", backend="chunked")
    assert "student   2 GEMMs in one pass" in str(plan) and "teacher   1, logits tile" in str(plan)
    assert "Divergence(kind='jsd', beta=0.5)" in plan.fingerprint
    assert "teacher   none" in str(explain_divergence(*args))


WRONG = {
    "kind: expected one of forward_kl, jsd, reverse_kl; got 'kl'": {"kind": "kl"},
    r"beta: expected a number in \(0, 1\), got 1.0": {"kind": "jsd", "beta": 1.0},
    "temperature: expected a finite number > 0, got 0": {"temperature": 0.0},
    "weights: expected the shape of hidden without its last dimension": {"weights": torch.ones(3)},
    "mask: expected the shape of hidden": {"mask": torch.ones(21, 1)},
    r"vocab_size: expected 1 to 67 \(ids of head\), got 68": {"vocab_size": 68},
    "teacher_topk: expected None beside teacher_hidden": {"teacher_topk": (1, 2)},
    "teacher_hidden: expected a tensor where there is no teacher_topk": {"teacher_hidden": None},
    "teacher_head: expected the student's vocabulary of 67 ids, got 66; .* padding": {
        "teacher_head": torch.ones(66, 16)
    },
    "teacher_hidden: expected shape .*21.* got": {"teacher_hidden": torch.ones(3, 16)},
    r"teacher_hidden: expected shape \(..., 15\) to match weight": {
        "teacher_head": torch.ones(67, 15)
    },
    "teacher_hidden, teacher_head: expected tensors that need no gradient": {
        "teacher_head": torch.ones(67, 16, requires_grad=True)
    },
    "teacher_hidden: expected fp64 with fp64 hidden": {
        "teacher_hidden": torch.ones(21, 16).double(),
        "teacher_head": torch.ones(67, 16).double(),
    },
    "backend: expected one of": {"backend": "gpu"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message: str) -> None:
    problem = Problem(Case())
    teacher = {"teacher_hidden": problem.teacher_hidden, "teacher_head": problem.teacher_weight}
    with pytest.raises(ValueError, match=message):
        linear_divergence(*problem.leaves.values(), **(teacher | WRONG[message]))


def test_wrong_topk() -> None:
    problem = Problem(Case(top_k=3))
    assert problem.topk is not None
    values, ids = problem.topk
    for message, topk in {
        r"teacher_topk: expected \(log-probabilities, ids\)": values,
        "teacher_topk ids: expected a torch.int64 tensor": (values, ids.int()),
        "teacher_topk log-probabilities: expected shape": (values[:3], ids),
        "teacher_topk log-probabilities: expected descending": (values.flip(-1), ids),
        "teacher_topk ids: expected each once": (values, ids * 0),
        r"teacher_topk ids: expected ids in \[0, 67\)": (values, ids + 67),
        "expected probabilities that add up to 1 at most": (values + 5, ids),
        r"teacher_topk: expected 1 to 66 ids \(V - 1\), got 0": (values[:, :0], ids[:, :0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            linear_divergence(*problem.leaves.values(), teacher_topk=topk)  # type: ignore[arg-type]
