"""The choice between the schedules: what they are predicted to cost, and what fits."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import LossConfig, TokenBatch, explain, linear_policy_loss
from grpo_kernels.engine import recompute
from grpo_kernels.engine import sweep as schedule
from grpo_kernels.tools.estimate import (
    GPUS,
    HeadShape,
    MemoryPrediction,
    Speed,
    cost,
    datasheet,
    find_gpu,
)
from grpo_kernels.tools.estimate.cost import Cost, Costs, predict_costs, speed_of
from grpo_kernels.tools.estimate.cost_rates import MEASURED_ON, RATES
from grpo_kernels.tools.estimate.shape import Setting
from grpo_kernels.tools.estimate.work import DURATIONS, Work
from grpo_kernels.tools.estimate.work import RATES as RATE_OF

CPU = torch.device("cpu")
QWEN = dict(hidden=896, vocabulary=151936)
XEON = "cpu amx"
SIMPLE = Speed(matrix=1e12, wide_matrix=1e11, bandwidth=1e10, where="a test", source="a test")


def costs(head: HeadShape, speed: Speed, precision: str = "fp32", **setting: object) -> Costs:
    return predict_costs(head, Setting(**setting), precision, speed)  # type: ignore[arg-type]


@pytest.fixture
def xeon(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, Speed]:
    """What was fitted on the CPU of the benchmarks, whatever this one is."""
    monkeypatch.setattr(cost, "class_of", lambda device: XEON)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(MEASURED_ON[XEON]["threads"]))
    return {dtype: speed_of(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)}


def test_what_was_measured_on_a_cpu_is_chosen_there(xeon: dict[torch.dtype, Speed]) -> None:
    """Of heads and lengths whose times lie far enough apart."""

    def faster(dtype: torch.dtype, tokens: int, precision: str = "fp32", **head: bool) -> str:
        shape = HeadShape(dtype=dtype, **QWEN, **head)
        setting = dict(tokens=tokens, device="cpu", native=True)
        return costs(shape, xeon[dtype], precision, **setting).choose(None)[0]

    # several chunks add to an fp32 sum of the size of the weight, each reading and writing it
    assert faster(torch.bfloat16, 1024) == "two_pass"
    assert faster(torch.bfloat16, 512) == "one_pass"
    assert faster(torch.bfloat16, 1024, frozen=True) == "one_pass"
    assert faster(torch.bfloat16, 1024, "input") == "one_pass"
    assert {faster(torch.float32, tokens) for tokens in (64, 256, 1024)} == {"one_pass"}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_gpu_of_which_nothing_is_known_keeps_one_pass(gpu) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1024, 8192, 65536):
            for hidden, columns in ((896, 151936), (2048, 151936), (4096, 128256)):
                head = HeadShape(hidden=hidden, vocabulary=columns, dtype=dtype)
                found = costs(head, datasheet(gpu, dtype), tokens=tokens, device="cuda")
                assert found.faster == "one_pass", (dtype, tokens, hidden)


def test_a_small_workspace_pays_for_its_many_chunks() -> None:
    head, speed = HeadShape(**QWEN), datasheet(find_gpu("H200"), torch.bfloat16)
    setting = dict(tokens=8192, device="cuda")
    wide, narrow = (costs(head, speed, **setting, tile_rows=rows) for rows in (4096, 128))
    assert wide.faster == "one_pass" and narrow.faster == "two_pass"
    assert narrow.one_pass.seconds > wide.one_pass.seconds


def test_the_work_is_that_of_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of each kind, counted where they are made."""
    made: list[int] = []

    def count(module: object, name: str) -> None:
        run = getattr(module, name)

        def counted(*args, **kwargs):
            out = run(*args, **kwargs)
            factors = [x for x in args if isinstance(x, torch.Tensor)]
            made.append(2 * factors[-2].numel() * factors[-1].shape[-1])
            return out

        monkeypatch.setattr(module, name, counted)

    monkeypatch.setattr(torch, "mm", torch.mm)
    count(torch, "mm")
    count(torch, "addmm")
    tokens, hidden, columns, rows = 20, 8, 300, 7
    head = HeadShape(hidden=hidden, vocabulary=columns, dtype=torch.float32)
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(columns, hidden, requires_grad=True)
    target = torch.randint(columns, (1, tokens))
    batch = TokenBatch.from_padded(target, torch.ones(1))
    for name in ("one_pass", "two_pass"):
        made.clear()
        linear_policy_loss(
            x[None], weight, batch, LossConfig(), backend="chunked", schedule=name,
            max_workspace_bytes=rows * columns * 4,
        ).loss.backward()  # fmt: skip
        setting = Setting(tokens=tokens, device="cpu", tile_rows=rows, native=False)
        work = cost.SCHEDULES[name](head, setting, "fp32")
        assert sum(made) == work.flop == work.all_flop, name


def test_kinds_of_work_cost_what_a_speed_says() -> None:
    names = [*RATE_OF, *DURATIONS]
    for index, name in enumerate(names):
        work = Work(**{name: index + 1})
        if name in RATE_OF:
            assert work.seconds(SIMPLE) == (index + 1) / SIMPLE.rate(RATE_OF[name])
    both = Work(flop=1e12) + Work(flop=1e12, pieces=3)
    assert both.seconds(SIMPLE) == 2 and both.pieces == 3
    # what is not known is like a plain product, a plain pass
    assert SIMPLE.rate("sums") == SIMPLE.rate("fused") == 1e12 and SIMPLE.rate("adding") == 1e10


def made_up(one: float, two: float, one_bytes: int = 30, two_bytes: int = 10) -> Costs:
    def of(seconds: float, size: int) -> Cost:
        return Cost(seconds, MemoryPrediction(0, 0, size, "now"))

    return Costs(one_pass=of(one, one_bytes), two_pass=of(two, two_bytes), source="a test")


@pytest.mark.parametrize(
    "times,free,schedule,reason",
    [
        ((1.0, 2.0), None, "one_pass", "predicted to be the faster"),
        ((2.0, 1.0), None, "two_pass", "predicted to be the faster"),
        ((1.0, 1.02), None, "two_pass", "predicted to be as fast, in less memory"),
        ((1.0, 1.04), None, "one_pass", "predicted to be the faster"),
        ((1.0, 2.0), 30, "one_pass", "predicted to be the faster"),
        ((1.0, 2.0), 29, "two_pass", "one_pass needs"),
        ((1.0, 2.0), 9, "two_pass", "neither fits"),
        ((2.0, 1.0), 9, "two_pass", "neither fits"),
    ],
)
def test_the_faster_that_fits(
    times: tuple[float, float], free: int | None, schedule: str, reason: str
) -> None:
    chosen, why = made_up(*times).choose(free)
    assert chosen == schedule and reason in why


def problem(tokens: int = 64, hidden: int = 16, columns: int = 500, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, tokens // 4, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(columns, hidden, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(columns, (4, tokens // 4), generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    old = torch.full(target.shape, -6.0)
    return x, weight, TokenBatch.from_padded(target, advantages, old_logprobs=old)


@pytest.fixture(params=["one_pass", "two_pass"])
def predicted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model finds this schedule faster, whatever the call."""
    times = {"one_pass": (1.0, 2.0), "two_pass": (2.0, 1.0)}[request.param]
    monkeypatch.setattr(cost, "predict_costs", lambda *_: made_up(*times))
    return request.param


def test_auto_follows_the_prediction_and_says_so(predicted: str) -> None:
    args = (*problem(), LossConfig(beta=0.0))
    plan = explain(*args)
    assert plan.schedule == predicted and predicted in plan.fingerprint
    assert f"{predicted}: predicted to be the faster" in str(plan)
    first = {"one_pass": "1 s", "two_pass": "2 s"}[predicted]
    assert f"cost      one_pass {first}, 0 MiB; two_pass " in str(plan) and "(a test)" in str(plan)
    forced = explain(*args, schedule="two_pass")
    assert forced.schedule == "two_pass" and "forced by the argument" in str(forced)
    gate = explain(*args[:3], LossConfig(top_entropy_quantile=0.5))
    assert gate.schedule == "two_pass" and gate.costs is None


def test_free_memory_decides_only_where_the_faster_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = (*problem(), LossConfig())
    monkeypatch.setattr(cost, "predict_costs", lambda *_: made_up(1.0, 2.0, 1000, 10))
    for free, expected in ((10**9, "one_pass"), (1000, "one_pass"), (999, "two_pass")):
        monkeypatch.setattr(cost, "free_memory", lambda device, free=free: free)
        plan = explain(*args)
        assert plan.schedule == expected
        assert ("are free" in str(plan)) == (expected == "two_pass")


def test_the_same_call_has_the_same_plan() -> None:
    args = (*problem(), LossConfig())
    first, second = explain(*args), explain(*args)
    assert (first.schedule, first.fingerprint) == (second.schedule, second.fingerprint)
    assert first.costs == second.costs and cost.free_memory(CPU) > 0


@pytest.mark.parametrize("name", ("dapo", "gspo"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_both_schedules_agree_to_rounding(name: str, dtype: torch.dtype) -> None:
    x, weight, batch = problem(dtype=dtype)
    found = []
    for schedule_name in ("one_pass", "two_pass"):
        loss = linear_policy_loss(
            x, weight, batch, LossConfig(loss_type=name, beta=0.0), schedule=schedule_name
        ).loss
        found.append([loss, *torch.autograd.grad(loss, (x, weight))])
    # the gradient of 16-bit inputs is rounded once in each
    allowed = 2e-6 if dtype == torch.float32 else 2**-8
    for one, two in zip(*found, strict=True):
        assert (one - two).float().norm() <= (2e-6 if one.dim() == 0 else allowed) * two.norm()


def test_a_workspace_bounds_the_tiles_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, batch = problem(tokens=256, columns=3000)
    sizes: list[int] = []
    for module in (schedule, recompute):

        def seen(tensor, keep=module.on_huge_pages):
            sizes.append(tensor.numel() if tensor.dtype == torch.float32 else 0)
            return keep(tensor)

        monkeypatch.setattr(module, "on_huge_pages", seen)
    for rows in (1, 5, 100):
        for name in ("one_pass", "two_pass"):
            sizes.clear()
            linear_policy_loss(
                x, weight, batch, LossConfig(), schedule=name,
                max_workspace_bytes=rows * 3000 * 4,
            ).loss.backward()  # fmt: skip
            tiles = [size for size in sizes if size not in (x.numel(), weight.numel())]
            assert tiles and max(tiles) <= rows * 3000


def test_no_formula_no_choice() -> None:
    x, weight, batch = problem(dtype=torch.float64)
    plan = explain(x, weight, batch, LossConfig())
    assert plan.costs is None and plan.schedule == "one_pass"
    assert "cost" not in str(plan)


def test_where_speeds_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "class_of", lambda device: XEON)
    threads = int(MEASURED_ON[XEON]["threads"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * threads)
    fitted = speed_of(CPU, torch.float32)
    assert fitted.source == f"fitted on {MEASURED_ON[XEON]['device']}"
    # twice the threads, twice the rates; a chunk costs what it did
    row = dict(zip(cost.FITTED, RATES[XEON, "fp32"], strict=True))
    assert fitted.matrix == 2 * row["matrix"] and fitted.piece == row["piece"]
    assert speed_of(CPU, torch.float16) == speed_of(CPU, torch.bfloat16)
    monkeypatch.setattr(cost, "class_of", lambda device: "cpu unheard of")
    assert speed_of(CPU, torch.bfloat16).source.startswith("a guess for this device")
    assert "data sheet of H200" in cost._guess("NVIDIA H200", torch.bfloat16, 1).source
    assert cost._guess("NVIDIA Unheard-of", torch.bfloat16, 1).source.startswith("a guess")
