"""The judge: exact answers, what rounding may do to them, and whether the product's fit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.net import oracle
from tests.net.cases import Case
from tests.net.problem import Problem, trained_names
from tests.net.product import TOLERANCE
from tests.net.results import DIFFERENTIABLE, SCALE, Found, objective_of

# digits that an exact answer may lose to rounding at its end
_FLOOR = {torch.float32: 4e-6, torch.float64: 1e-10, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
_TIES = -1  # in place of a seed: what is as good as equal is equal
_DISTURBANCES = ((4.0, 0), (-4.0, 1), (0.0, _TIES), *((0.0, seed) for seed in range(2, 12)))
# below this a value is as good as 0 (times the floor): its probability is not told from 0 or 1,
# or fp16 is at the end of its range, for which callers scale their losses
_LEAST = {torch.float64: 1e-3, torch.float32: 1e-12, torch.bfloat16: 1e-12, torch.float16: 1e-3}
_SLOPE = 0.06  # two roundings of tanh, over a floor: 1 - tanh^2 at the end of a cap is no more
_SAMPLED = 6  # standard deviations of a bounded backward in small batches
_SCALES = (1.0, 1.17, 1.41)


class Judge:
    """Holds what a case's answers may be; what costs more is made only where it is needed."""

    def __init__(self, case: Case, problem: Problem) -> None:
        self.case, self.problem = case, problem
        self.dtype = getattr(torch, case.dtype)
        self.wide = torch.float64 if case.dtype == "float64" else torch.float32
        self.multiplied = torch.bfloat16 if case.autocast else self.dtype

    def judge(self, got: Found) -> None:
        exact = self.exact.all()
        for name in ("loss", "divergence", *self.case.outputs):
            value = got.values.get(name)
            if value is not None and value.is_floating_point():
                assert value.dtype == self.wide, f"{name}: expected {self.wide}, got {value.dtype}"
        for name, value in got.all().items():
            if name in _RANKED:
                _RANKED[name](self, value)
            elif name not in OF_BOUNDED:
                self._compare(name, value, exact)
        if self.case.ranks > 1 and self.case.shared == "sequences":  # their metrics are per rank
            exact = {n: x for n, x in exact.items() if n == "loss" or n[1:] in got.gradients}
        missing = exact.keys() - got.all().keys()
        assert not missing, f"expected {', '.join(sorted(missing))}"

    def _compare(self, name: str, value: Tensor, exact: dict[str, Tensor]) -> None:
        assert name in exact, f"{name}: the oracle has no such value"
        assert value.shape == exact[name].shape, f"{name}: {value.shape}, {exact[name].shape}"
        size = self.sizes.get(name)
        if size is not None and self.case.bounded and name not in self._exact_ones():
            self._compare_sampled(name, value, exact[name], size)
            return
        least = self._least(name, value, size)
        if name == "sampling/mismatch_kl_k1":  # a mean of what may cancel
            size = exact["sampling/sampling_logp_difference/mean"]
        error = _error(value, exact[name], size, least)
        floor = self._floor(name, value)
        if bool((error <= floor).all()):
            return
        allowed = [_error(x.all()[name], exact[name], size, least) for x in self.others]
        # theirs happens to be the smaller at times, where a loss's terms cancel
        allowed = 3 * torch.stack(allowed).amax()
        if not bool((error <= allowed.clamp(min=floor)).all()):
            worst = float(error.nan_to_num(nan=torch.inf).max())
            raise AssertionError(
                f"{name}: error {worst:.1e} of its size, allowed {float(allowed):.1e}; got "
                f"{value.flatten()[:6].tolist()}, expected {exact[name].flatten()[:6].tolist()}"
            )

    def _compare_sampled(self, name: str, value: Tensor, exact: Tensor, size: Tensor) -> None:
        held = size.to(value.dtype).isfinite()  # in the range of 16 bits, its parts as well
        error = torch.where(held, value - exact, 0.0).norm()
        nothing = self._floor(name, value) * self._least(name, value, size)
        most = _SAMPLED * TOLERANCE * size.norm() + nothing
        if not error <= most:  # a clipped row may have no gradient at all
            if not all(x.all()[name].isfinite().all() for x in self.eager):
                return  # logits beyond 16 bits
            edges = [torch.where(held, x.all()[name] - exact, 0.0).norm() for x in self.others]
            most = most + 2 * torch.stack(edges).nan_to_num(nan=0.0).max()
        assert error <= most, f"{name}: {error:.1e}, allowed {most:.1e}"

    def _least(self, name: str, value: Tensor, size: Tensor | None) -> float:
        """Return the size below which a value is as good as 0."""
        least = _LEAST[value.dtype if size is None else self.multiplied]
        if size is None or not size.numel():
            return least
        if torch.float16 in (self.multiplied, value.dtype):
            # what is lost at the end of the range is multiplied with these
            sizes = [float(x.abs().max()) for x in self.problem.leaves.values() if x.numel()]
            return _LEAST[torch.float16] * max(1.0, *sizes)
        # on CPUs probabilities below 2**-64 (1 - p) of the target's have no gradient, and 1 - p of
        # a sampling mask is that of a quotient
        return max(least, 2.0**-50 / _FLOOR[self.multiplied] * float(size.max()))

    def _floor(self, name: str, value: Tensor) -> float:
        dtype = value.dtype
        if name in self.sizes:
            dtype = max(self.multiplied, dtype, key=_FLOOR.__getitem__)
        if self.case.precision == "input":
            dtype = self.multiplied
        # the (T, r) product of an adapter is rounded, too
        return _FLOOR[dtype] * (2 if self.case.lora and dtype.itemsize == 2 else 1)

    def _exact_ones(self) -> tuple[str, ...]:
        """Return the gradients that a bounded backward leaves exact."""
        if "entropy" in self.case.outputs:
            return ("dhidden", "dweight", "dbias", "da", "db")
        return ("dweight", "dbias", "db") if self.case.seed % 2 == 0 and not self.case.tied else ()

    @cached_property
    def exact(self) -> Found:
        return self._answer(torch.float64)

    @cached_property
    def sizes(self) -> dict[str, Tensor]:
        """What is added up in each element of a gradient, all with the same sign."""
        dlogits, leaves = self._dlogits.nan_to_num(posinf=0.0), self.problem.leaves
        x, weight = self.problem.rows(leaves["hidden"]).double().abs(), leaves["weight"].double()
        of_rows = dlogits @ weight.abs()
        found = {"dweight": dlogits.t() @ x, "dbias": dlogits.sum(0)}
        if self.case.lora:
            a, b = (leaves[name].double().abs() for name in ("a", "b"))
            of_rows = of_rows + self.case.scaling * dlogits @ b @ a
            found["da"] = self.case.scaling * (dlogits @ b).t() @ x
            found["db"] = self.case.scaling * dlogits.t() @ (x @ a.t())
        hidden = leaves["hidden"].flatten(0, -2).double() * 0
        hidden[self.problem.keep] = of_rows
        found["dhidden"] = hidden.reshape(leaves["hidden"].shape)
        if self.problem.embedded is not None:
            ids = self.problem.embedded.flatten()
            found["dweight"] = found["dweight"].index_add(0, ids, hidden)
        return found

    @cached_property
    def eager(self) -> list[Found]:
        """Eager answers, with gradients of the logits that are rounded in some ways."""
        rounded = self.multiplied if self.case.precision == "input" else None
        if self.multiplied.itemsize > 2:
            return [self._answer(self.wide, rounded)]
        return [self._answer(self.wide, rounded, (self.multiplied, x)) for x in _SCALES]

    @cached_property
    def disturbed(self) -> list[Found]:
        """Exact answers to scores that are as wrong as rounding alone can make them."""
        size = self.unit
        return [self._answer(torch.float64, None, None, size, *how) for how in _DISTURBANCES]

    @cached_property
    def disturbed_eager(self) -> list[Found]:
        """Eager answers to such scores: what cancels within the loss cancels here as well."""
        size = 2 * self.unit
        return [self._answer(self.wide, None, None, size, 0.0, seed) for seed in range(8)]

    @property
    def others(self) -> list[Found]:
        """Answers that are as good as rounding allows."""
        return [*self.eager, *self.disturbed, *self.disturbed_eager]

    @cached_property
    def unit(self) -> float:
        """The rounding of a score: an ulp of the largest sum that is made on the way to it."""
        case, leaves = self.case, self.problem.leaves
        models = [leaves, *([self.problem.teacher] if "weight" in self.problem.teacher else ())]
        largest = 0.0
        for x in models:
            sums = x["hidden"].double().abs().flatten(0, -2) @ x["weight"].double().abs().t()
            if "bias" in x:
                sums = sums + x["bias"].double().abs().nan_to_num(posinf=0.0)
            largest = max(largest, float(sums.max() if sums.numel() else 0.0))
        size = 1 + largest * max(self.steepest, 1.0)
        dtype = self.multiplied if case.precision == "input" else self.wide
        return size * torch.finfo(dtype).eps

    @cached_property
    def steepest(self) -> float:
        """How fast a score grows with a logit where no cap holds it."""
        least = self.problem.temperature
        least = float(least.min()) if isinstance(least, Tensor) and len(least) else least
        return abs(self.case.logit_scale) / (least if isinstance(least, float) else 1.0)

    def _answer(
        self,
        dtype: torch.dtype,
        rounded: torch.dtype | None = None,
        narrow: tuple[torch.dtype, float] | None = None,
        noise: float = 0.0,
        shift: float = 0.0,
        seed: int = 0,
    ) -> Found:
        case, names = self.case, trained_names(self.case)
        posed = self.problem.posed(names, None if dtype != torch.float64 else dtype)
        leaves = dict(posed.leaves)
        if case.autocast:
            for name in ("hidden", "weight"):
                leaves[name] = leaves[name] + _rounding(leaves[name])
        generator = torch.Generator().manual_seed(abs(seed))

        def noisy(x: Tensor, shift: float = 0.0) -> Tensor:
            if not noise:
                return x
            if seed == _TIES:
                rounding = torch.round(x / noise) * noise - x
                return x + torch.where(x.isfinite(), rounding, 0.0).detach()
            return x + noise * (torch.randn(x.shape, generator=generator).to(x) + shift)

        stored = replace(posed, leaves=leaves)
        hidden = stored.rows(leaves["hidden"])
        more = torch.zeros(len(hidden), case.vocab, dtype=dtype, requires_grad=True)
        scores = stored.head(case).scores(hidden, dtype, rounded, narrow, more)
        target = posed.target.flatten()[posed.keep]
        members = None if posed.members is None else posed.members[posed.keep]
        values = oracle.statistics(noisy(scores), target, members)
        for name in DIFFERENTIABLE:
            if name in values:
                values[name] = noisy(values[name], shift)
        old = self.problem.rollout.old if case.of_loss and seed == _TIES else None
        for name in ("logprobs", "masked_logprobs") if old is not None else ():
            if name in values:  # a ratio of 1 is within every clipping, one beside it may not be
                x = values[name]
                values[name] = torch.where((x - old).abs() <= 2 * noise, x + (old - x).detach(), x)
        parts = {name: values[name] for name in DIFFERENTIABLE if name in values}
        if case.divergence:
            of_teacher = noisy(self._teacher(dtype, rounded))
            parts = {"divergence": self._divergence(noisy(scores), of_teacher)}
            weights = posed.advantages[posed.keep] if case.advantages == "token" else 1.0
            objective = (parts["divergence"] * weights).sum() / max(len(scores), 1)
            values = {"loss": objective, "entropy": values["entropy"], **parts}
        elif case.of_loss:
            values, objective = self._loss(values)
        else:
            values = {name: x for name, x in values.items() if name in case.outputs}
            objective = objective_of(values)
            self.scores = scores.detach()
        kept = [posed.leaves[name] for name in names]
        found = torch.autograd.grad(
            objective * SCALE, [*kept, *parts.values()], allow_unused=True, retain_graph=True
        )
        if dtype == torch.float64 and not noise:
            self._dlogits = self._sizes_of(parts, found[len(kept) :], more, scores)
        pairs = zip(names, kept, found[: len(kept)], strict=True)
        gradients = {n: torch.zeros_like(x) if g is None else g for n, x, g in pairs}
        return Found({name: x.detach() for name, x in values.items()}, gradients)

    _dlogits: Tensor

    def _teacher(self, dtype: torch.dtype, rounded: torch.dtype | None) -> Tensor:
        """Return the teacher's (T, V) scores, or (T, k) log-probabilities of its ids."""
        problem = self.problem
        if self.case.top_k:
            return problem.teacher["topk_logprobs"][problem.keep].to(dtype)
        teacher = dict(problem.teacher)
        if self.case.autocast:
            for name in ("hidden", "weight"):
                teacher[name] = teacher[name] + _rounding(teacher[name])
        return replace(problem, teacher=teacher).teacher_scores(dtype, rounded)

    def _divergence(self, scores: Tensor, of_teacher: Tensor) -> Tensor:
        case, problem = self.case, self.problem
        if not case.top_k:
            logp, teacher = scores.log_softmax(-1), of_teacher.log_softmax(-1)
        else:
            logp = oracle.with_tail(scores, problem.teacher["topk_indices"][problem.keep])
            left = -of_teacher.double().exp().sum(-1, keepdim=True).clamp(max=1)
            teacher = torch.cat([of_teacher, torch.log1p(left).to(scores.dtype)], -1)
        return oracle.divergence(logp, teacher, case.divergence, case.beta)

    def _sizes_of(
        self,
        parts: dict[str, Tensor],
        factors: tuple[Tensor | None, ...],
        logits: Tensor,
        scores: Tensor,
    ) -> Tensor:
        """Return the sum of the sizes that each output's gradient of the logits has, (T, V)."""
        slope_lost = _SLOPE * self.steepest if self.case.softcap else 0.0
        total = torch.zeros_like(logits)
        for (name, part), factor in zip(parts.items(), factors, strict=True):
            if factor is None:
                continue
            if name.endswith("logprobs"):
                factor = factor * self._cancelled(part.detach())
            found, before = torch.autograd.grad(part, (logits, scores), factor, retain_graph=True)
            total += found.abs() + slope_lost * before.abs()
            if name == "entropy":  # a backward that forms the logits again has others
                others = self.unit / _FLOOR[self.wide] * self.steepest * scores.softmax(-1)
                total += others * factor.abs()[:, None]
            if self.multiplied == torch.float16 and factor.numel():  # of one scale, for the largest
                total += 2.0**-24 / _FLOOR[torch.float16] * factor.abs().max()
        return total.detach()

    def _cancelled(self, logprobs: Tensor) -> Tensor | float:
        """Return by how much the gradient's terms are larger than their sum: a ratio times k3 has
        e^d of the one and of the other."""
        case = self.case
        if not case.of_loss:
            return 1.0
        c = oracle.settings_of(case.loss_type, case.settings)
        if not (c.beta and c.kl_estimator == "k3" and c.use_bias_correction_kl):
            return 1.0
        d = self.problem.rollout.ref.to(logprobs) - logprobs
        return 1 + d.clamp(max=oracle.LIMIT).exp() / d.abs().clamp(min=1)

    def _loss(self, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        case, x = self.case, self.problem.rollout
        c = oracle.settings_of(case.loss_type, case.settings)
        logprobs = values["masked_logprobs" if case.sampling_mask else "logprobs"]
        entropy = values["entropy"]
        loss, metrics = oracle.policy_loss(logprobs, entropy, x, c)
        if case.entry != "composed":
            keep = rows_with_gradient(x, c)
            if case.metric_rows == "active":
                active = of_rows(x, keep)
                measured = oracle.policy_loss(logprobs[keep], entropy[keep], active, c)[1]
                metrics = measured | {n: metrics[n] for n in ("policy_loss",) if n in metrics}
            total = self.problem.target.numel()
            metrics["frac_rows_skipped"] = (total - keep.double().sum()) / total
        return {"loss": loss} | metrics, loss


def rows_with_gradient(x: oracle.Rollout, c: Any) -> Tensor:
    """Return which tokens can have a gradient, (T,) bool."""
    tau = {"dppo_tv": c.dppo_tau, "dppo_kl": c.dppo_tau, "ipo": c.ipo_tau}.get(c.loss_type)
    if c.beta or c.entropy_coef or tau:
        return torch.ones(x.num_valid, dtype=torch.bool)
    keep = x.advantages != 0
    return x.expand(x.sums(keep.double())) > 0 if whole_sequences(x, c) else keep


def of_rows(x: oracle.Rollout, keep: Tensor) -> oracle.Rollout:
    """Return the tokens of an index, without the sequences that have none."""
    lengths = tuple(int(n) for n in x.sums(keep.double()) if n)
    parts: dict[str, Any] = {
        name: getattr(x, name)[keep]
        for name in ("advantages", "old", "ref", "rollout", "rollout_weights")
        if getattr(x, name) is not None
    }
    if x.prompt_tokens is not None:
        occupied = [bool(n) for n in x.sums(keep.double())]
        parts["prompt_tokens"] = tuple(itertools.compress(x.prompt_tokens, occupied))
    return replace(x, lengths=lengths, **parts)


def whole_sequences(x: oracle.Rollout, c: Any) -> bool:
    """Return whether a token's gradient reaches the other tokens of its sequence."""
    return (
        c.importance_sampling_level != "token"
        or c.loss_type in oracle.OWN_SEQUENCES
        or c.off_policy_mask_threshold is not None
        or c.top_entropy_quantile < 1
        or (x.rollout is not None and oracle._by_sequence(x, c))
    )


def _rounding(x: Tensor) -> Tensor:
    return (x.to(torch.bfloat16).to(x.dtype) - x).detach()


def _error(value: Tensor, exact: Tensor, size: Tensor | None, least: float) -> Tensor:
    """Return the error of each element, over its size; 0 where both are the same."""
    stored_in = value.dtype if value.is_floating_point() else torch.float32
    value, stored = value.double(), exact.to(stored_in).double()
    if stored_in == torch.float16:  # at the end of its range; of two ranks each has twice the mean
        end = torch.finfo(stored_in).max / 2
        beyond = ~value.isfinite() & (exact.abs() if size is None else size).ge(end)
        value, stored, exact = (x.clamp(-end, end) for x in (value, stored, exact))
        value = torch.where(beyond, stored, value)
    same = (value == stored) | (value.isnan() & exact.isnan())
    size = exact.double().abs() if size is None else torch.maximum(size, exact.double().abs())
    size = size.nan_to_num(posinf=0.0) + least
    return torch.where(same, 0.0, (value - exact).abs() / size).nan_to_num(nan=torch.inf)


def _check_top1(judge: Judge, value: Tensor) -> None:
    own = judge.scores.gather(-1, _target(judge)[:, None])[:, 0]
    best, slack = judge.scores.amax(-1), 8 * judge.unit
    assert bool((own[value] >= best[value] - slack).all()), f"is_top1: {value.tolist()}"
    second = judge.scores.scatter(-1, _target(judge)[:, None], -torch.inf).amax(-1)
    assert bool(value[own > second + slack].all()), f"is_top1: {value.tolist()}"


def _check_topk_logprobs(judge: Judge, value: Tensor) -> None:
    exact = judge.scores.log_softmax(-1).sort(-1, descending=True).values[:, : value.shape[1]]
    slack = 16 * judge.unit * (1 + exact.abs().nan_to_num(posinf=0.0))
    close = ((value - exact).abs() <= slack) | (value == exact)
    assert bool(close.all()), f"topk_logprobs: {value.tolist()}, expected {exact.tolist()}"


def _check_topk_indices(judge: Judge, value: Tensor) -> None:
    for row in value.tolist():
        assert len(set(row)) == len(row), f"topk_indices: {row}"
    best = judge.scores.sort(-1, descending=True).values[:, : value.shape[1]]
    found, slack = judge.scores.gather(-1, value), 8 * judge.unit
    close = ((found - best).abs() <= slack) | (found == best)
    assert bool(close.all()), f"topk_indices: {value.tolist()}"


OF_BOUNDED = ("backward_entries", "backward_whole_rows", "backward_error", "backward_error_bound")
_RANKED = {
    "is_top1": _check_top1,
    "topk_logprobs": _check_topk_logprobs,
    "topk_indices": _check_topk_indices,
}


def _target(judge: Judge) -> Tensor:
    return judge.problem.target.flatten()[judge.problem.keep]
