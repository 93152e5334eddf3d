"""``python -m tests.support_matrix [--check]``: the tables of docs/reference/support.md.

What they say is read from the tests: from the generated cases as `make test` draws them, from the
calls that an emulator runs, from the parameters that pytest collects, from the variants of kernels
that are compiled, from the records of hosts and from the errors that were measured on a GPU.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

import ast
import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.net import calls, test_findings, test_net
from tests.net.cases import LOSSES, Case
from tests.net.checks import refusals

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
EMULATED, ON_GPU = "triton, emulated", "triton, on a GPU"
BACKENDS = ("reference", "chunked", "cpu", "triton")
COLUMNS = {
    "auto": "default on a CPU",
    **{name: f"`{name}`" for name in BACKENDS[:3]},
    "triton": "`triton`, interpreter",
    EMULATED: "`triton`, gfx942",
    ON_GPU: "`triton`, GPU",
}
# tests of the kernels and of calls; those of the trainer know no backend
COLLECTED = (
    "tests/test_linear_policy_loss.py",
    "tests/test_linear_logprobs.py",
    "tests/test_linear_divergence.py",
    *(f"tests/{name}" for name in ("backends", "engine", "head", "schedule", "gpu")),
)
Feature = Callable[[Case], Any]

CALLS: dict[str, Feature] = {
    "`linear_policy_loss`": lambda c: c.of_loss and c.entry == "function",
    "`FusedLinearGRPOLoss`": lambda c: c.of_loss and c.entry == "module",
    "`FusedHead`": lambda c: (
        c.entry == "fused_head" and not c.lora and not c.tied and c.twist != "checkpoint"
    ),
    "`policy_loss` of given log-probabilities": lambda c: c.of_loss and c.entry == "composed",
    "`linear_logprobs`": lambda c: c.outputs,
    "... entropy": lambda c: "entropy" in c.outputs,
    "... `top_k`": lambda c: any("topk" in name for name in c.outputs),
    "padded batch": lambda c: c.of_loss and not c.packed,
    "packed batch": lambda c: c.of_loss and c.packed,
    "masked tokens": lambda c: c.masked,
    "advantages per token": lambda c: c.of_loss and c.advantages == "token",
    "tokens of zero advantage": lambda c: c.of_loss and c.advantages == "some_zero",
    "`rollout_logprobs`": lambda c: c.of_loss and c.rollout in ("given", "unknown", "far"),
    "`rollout_weights`": lambda c: c.of_loss and c.rollout == "weights",
    "KL penalty": lambda c: c.settings.get("beta"),
    "entropy bonus": lambda c: c.settings.get("entropy_coef"),
    "tokens of highest entropy alone": lambda c: c.settings.get("top_entropy_quantile", 1) < 1,
    "off-policy mask": lambda c: c.settings.get("off_policy_mask_threshold") is not None,
}
HEADS: dict[str, Feature] = {
    "bias": lambda c: c.bias,
    "softcap": lambda c: c.softcap is not None,
    "`logit_scale`": lambda c: c.logit_scale != 1,
    "a temperature per row": lambda c: c.row_temperature,
    "LoRA on the head": lambda c: c.lora,
    "LoRA in another dtype than the head": lambda c: c.lora and c.factors not in ("same", c.dtype),
    "weight tied to the hidden states": lambda c: c.tied,
    "frozen weight": lambda c: c.trained in ("hidden", "lora", "bias"),
    "sampling mask": lambda c: c.sampling_mask,
    "autocast": lambda c: c.autocast,
    "tensors that are not contiguous": lambda c: c.memory != "contiguous",
    "vocabulary over ranks": lambda c: c.ranks > 1 and c.shared == "vocab",
    "sequences over ranks": lambda c: c.ranks > 1 and c.shared == "sequences",
}
OPTIONS: dict[str, Feature] = {
    '`schedule="one_pass"`': lambda c: c.of_loss and c.schedule == "one_pass",
    '`schedule="two_pass"`': lambda c: c.of_loss and c.schedule == "two_pass",
    "several tiles (`max_workspace_bytes`)": lambda c: c.tile_rows is not None,
    '`precision="input"`': lambda c: c.precision == "input",
    "`batch_invariant`": lambda c: c.batch_invariant,
    '`metric_rows="active"`': lambda c: c.metric_rows == "active",
    "`activation_bytes`": lambda c: c.activation_bytes is not None,
    '`backward="sparse"`': lambda c: c.bounded,
    "`main_grad`": lambda c: c.main_grad,
    "several threads": lambda c: c.threads > 1,
    "activation checkpointing": lambda c: c.of_loss and c.twist == "checkpoint" and not c.main_grad,
}
BITS: dict[str, Feature] = {
    "the same call again": lambda c: c.twist == "again",
    "the backward of the same loss again": lambda c: c.twist == "second_backward",
    "NaN and infinities in rows without a loss": lambda c: (
        c.twist == "garbage_in_masked_rows" and not c.tied
    ),
    "`linear_logprobs` of other batches (`batch_invariant`)": lambda c: (
        c.outputs and c.twist == "split" and c.batch_invariant
    ),
    "no gradients wanted": lambda c: c.twist == "no_grad",
    "`torch.compile`": lambda c: c.twist == "compile",
}
BY_LOSS: dict[str, Feature] = {
    f"`{name}`": lambda c, name=name: c.of_loss and c.loss_type == name for name in LOSSES
}


# tests that compare with fp64, too: what a parameter of theirs stands for
PARTS = {
    "lora": "LoRA on the head",
    "sampling_mask": "sampling mask",
    "rollout_weights": "`rollout_weights`",
    "main_grad": "`main_grad`",
}
COMPARED: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "test_every_loss_on_a_gpu_and_in_triton": lambda x: (f"`{x['name']}`", "`linear_policy_loss`"),
    "test_parts_of_a_loss_on_a_gpu_and_in_triton": lambda x: (PARTS[x["part"]],),
    "test_every_output_on_a_gpu_and_in_triton": lambda x: ("`linear_logprobs`", "... entropy"),
}


@cache
def ran() -> list[tuple[str, Case]]:
    """Return the column and the case of every call that tests hold to the oracle."""
    drawn: list[Case] = [*test_findings.FINDINGS.values()]

    def find(number: int, count: int, of: Any, seen: Any) -> str:
        return _find(number, count, of, SimpleNamespace(add=drawn.append))

    _find = test_net.find
    with mock.patch.object(test_net, "find", find), mock.patch("tests.fuzz.check"):
        for test in vars(test_net).values():
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "parametrize" and mark.args[0] == "number":
                    for number in mark.args[1]:
                        test(number)
    emulated = ((EMULATED, case) for case in calls.CALLS.values())
    found = [*((case.backend, case) for case in drawn), *emulated]
    return [(column, case) for column, case in found if _is_supported(case)]


def _is_supported(case: Case) -> bool:
    """Return whether no rule may refuse a case: then values and gradients are compared."""
    return not refusals(case, SimpleNamespace(fields={}))[1]


@cache
def compared() -> list[tuple[str, str, str]]:
    """Return the feature, the column and the dtype of what the tests of COMPARED compare."""
    found = []
    names = {getattr(item, "originalname", "") for item in collected()}
    assert names >= {*COMPARED}, "a test of COMPARED has another name now"
    for item in collected():
        labels = COMPARED.get(getattr(item, "originalname", ""))
        if labels is not None:
            values = item.callspec.params
            column = ON_GPU if values["device"].type == "cuda" else values["backend"]
            if values["backend"] == "triton":
                dtype = str(values["dtype"]).removeprefix("torch.")
                features = [*labels(values), f'`schedule="{values.get("schedule")}"`']
                found += [(feature, column, dtype) for feature in features]
    return found


def by_backend(features: dict[str, Feature], title: str) -> str:
    """Write the dtypes in which values and gradients are compared with fp64, by backend."""
    lines = [[title, *COLUMNS.values()]]
    for name, has in features.items():
        met = defaultdict(set)
        for column, case in ran():
            if has(case):
                met[column].add(case.dtype)
        for feature, column, dtype in compared():
            if feature == name:
                met[column].add(dtype)
        lines.append([name, *(_in_order(met[column]) for column in COLUMNS)])
    return table(lines)


def _in_order(dtypes: Iterable[str]) -> str:
    return " ".join(short for name, short in DTYPES.items() if name in dtypes)


def table(lines: list[list[str]]) -> str:
    head, *rows = [f"| {' | '.join(line)} |".replace("  ", " ") for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows])


class _Collected:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = [*items]


@cache
def collected() -> list[pytest.Item]:
    """Return the tests of kernels and calls, those for a GPU included."""
    found = _Collected()
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", *COLLECTED]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(arguments, plugins=[found])
    return found.items


def by_module() -> str:
    """Write what the tests of kernels are parametrised over, by module."""
    modules: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in collected():
        modules[item.path].append(item)
    emulated = (ROOT / "tests" / "emulated" / "run.sh").read_text()
    lines = [["tests", "backends", "dtypes", "also as gfx942", "also on a GPU"]]
    for path, items in modules.items():
        parts = [_parameters(item) for item in items]
        backends = {x for part in parts for x in part if x in BACKENDS}
        dtypes = {str(x).split(".")[-1] for part in parts for x in part if _is_dtype(x)}
        place = path.relative_to(ROOT).as_posix()
        about = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
        about = " ".join(about.split()).rstrip(".").replace("``", "`")
        shown = " ".join(f"`{name}`" for name in BACKENDS if name in backends)
        on_gpu = any(item.get_closest_marker("gpu") for item in items)
        also = ["yes" if place in emulated else "", "yes" if on_gpu else ""]
        lines.append([f"[{about}](../../{place})", shown, _in_order(dtypes), *also])
    return table(lines)


def _parameters(item: pytest.Item) -> set[Any]:
    """Return the names and dtypes among what a test is parametrised over."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    values = [value for name, value in params.items() if name != "device"]
    found = set()
    while values:
        value = values.pop()
        if isinstance(value, tuple | list):
            values += value
        elif isinstance(value, str) or _is_dtype(value):
            found.add(value)
    return found


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def by_target() -> str:
    """Write the dtypes of the variants of each Triton kernel that are compiled, by target."""
    from tests.backends.compile_gate import TARGETS
    from tests.backends.gate_cases import cases as variants

    met: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for target in TARGETS:
        for case in variants(target):
            kinds = {kind.strip("*") for kind in case.types.values() if kind.startswith("*")}
            met[case.kernel.__name__][target] |= kinds & {*DTYPES.values()}
    lines = [["kernel", *TARGETS]]
    for kernel, targets in met.items():
        written = [" ".join(x for x in DTYPES.values() if x in targets[t]) for t in TARGETS]
        lines.append([f"`{kernel}`", *written])
    return table(lines)


def by_host() -> str:
    """Write which hosts hold an adapter to the contract, in which versions."""
    folder = ROOT / "tests" / "integrations"
    pinned = (ROOT / "constraints.txt").read_text()
    lines = [["contract", "adapters", "host", "how"]]
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        packages = dict.fromkeys(_packages(tree))
        packages.pop("made_up", None)  # a host of its own that tests switches
        own = folder / "hosts" / f"{path.stem.removeprefix('test_')}.txt"
        versions = own.read_text() if own.exists() else pinned
        found = {name: _version(name, versions) for name in packages}
        if not found:
            continue
        about = (ast.get_docstring(tree) or "").split("\n")[0].rstrip(".")
        ours = " ".join(f"`{name}`" for name in sorted(_adapters(tree)))
        hosts = ", ".join(f"{name} {version}".strip() for name, version in found.items())
        real = "`make test-integrations`" if own.exists() else "`make test-main`"
        how = real if all(found.values()) else "stand-in with its interfaces, or a checkout"
        lines.append([f"[{about}](../../{path.relative_to(ROOT)})", ours, hosts, how])
    return table(lines)


def _packages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Adapter":
            yield from (x.value.value for x in node.keywords if x.arg == "package")


def _version(package: str, pinned: str) -> str:
    """Return the version of a package among lines of requirements; empty: it is not there."""
    name = {"swift": "ms-swift"}.get(package, package.replace("_", "-"))
    return next((x[len(name) + 2 :] for x in pinned.split() if x.startswith(f"{name}==")), "")


def _adapters(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "grpo_kernels.integrations":
            yield from (x.name for x in node.names)


def on_gpu() -> str:
    """Write what was compared with fp64 on a GPU, by the files of results."""
    met: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl")):
        environment, *rows = map(json.loads, path.read_text().splitlines())
        if environment["kind"] != "cuda":
            continue
        for row in rows:
            facts, errors = row["facts"], row.get("errors") or {}
            if row["provider"].startswith("ours") and row["state"] == "measured" and errors:
                key = environment["device"], facts["work"]
                met[key][row["provider"]].add(facts["dtype"])
    lines = [["device", "call", "variant", "dtypes"]]
    for (device, work), variants in met.items():
        for name, dtypes in variants.items():
            lines.append([device, f"`{work}`", f"`{name}`", " ".join(sorted(dtypes))])
    return table(lines)


def write(check: bool = False) -> int:
    """Fill the blocks of the page, or only check them; not 0 where one is not as it would be."""
    from cogapp import Cog

    options = ["--check" if check else "-r", "-P", "-p", "from tests.support_matrix import *"]
    return Cog().main(["cog", *options, str(PAGE)])


if __name__ == "__main__":
    sys.exit(write("--check" in sys.argv))
