"""Imports go downward only: kernels without RL, losses without kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("grpo_kernels", "grpo_trainer", "benchmarks", "tests")

# module prefix -> the prefixes of this project that it may import; the longest prefix that fits
# a module is its rule
ALLOWED: dict[str, tuple[str, ...]] = {
    "grpo_kernels.version": (),
    "grpo_kernels.host": (),
    "grpo_kernels.kept": (),
    "grpo_kernels.opaque": (),
    "grpo_kernels.packing": ("grpo_kernels.host", "grpo_kernels.kept"),
    "grpo_kernels.batch": (
        "grpo_kernels.host",
        "grpo_kernels.kept",
        "grpo_kernels.opaque",
        "grpo_kernels.packing",
    ),
    "grpo_kernels.pointwise": ("grpo_kernels.pointwise", "grpo_kernels.triton_math"),
    "grpo_kernels.triton_math": (),
    "grpo_kernels.losses": ("grpo_kernels.losses", "grpo_kernels.batch", "grpo_kernels.opaque"),
    "grpo_kernels.logprob": (
        "grpo_kernels.host",
        "grpo_kernels.kept",
        "grpo_kernels.logprob",
        "grpo_kernels.packing",
        "grpo_kernels.triton_math",
        "grpo_kernels.version",
    ),
    "grpo_kernels.model_head": ("grpo_kernels.logprob.lora",),
    "grpo_kernels.model_router": (),
    "grpo_kernels.modeling": ("grpo_kernels.model_head", "grpo_kernels.model_router"),
    "grpo_kernels.model_check": ("grpo_kernels.model_head", "grpo_kernels.modeling"),
    "grpo_kernels": ("grpo_kernels",),
    "grpo_trainer": ("grpo_trainer", "grpo_kernels"),
    "benchmarks": ("benchmarks", "grpo_kernels", "grpo_trainer"),
    "tests": PACKAGES,
}
# imported by nobody above them in the packages: they join what lies below
_TOP = (
    "fused",
    "compiled",
    "schedules",
    "plan",
    "fallback",
    "middle",
    "active",
    "weight_grad",
    "testing",
    "modeling",
    "model_check",
    "selfcheck",
    "cli",
)
TOP = tuple(f"grpo_kernels.{name}" for name in _TOP)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, module: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level or None]
                base = ".".join([*package, base]).strip(".")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in PACKAGES}


def fits(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(module: str, names: set[str]) -> list[str]:
    rule = max((prefix for prefix in ALLOWED if fits(module, prefix)), key=len)
    below_top = fits(module, "grpo_kernels") and not any(fits(module, top) for top in TOP)
    bad = [name for name in names if not any(fits(name, prefix) for prefix in ALLOWED[rule])]
    if below_top and module != "grpo_kernels":
        bad += [name for name in names if any(fits(name, top) for top in TOP)]
    return sorted(bad)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    module = module_name(path)
    assert violations(module, imported(path, module)) == []


def test_the_rule_catches_an_upward_import() -> None:
    assert violations("grpo_kernels.losses.kl", {"grpo_kernels.logprob.op"})
    assert violations("grpo_kernels.logprob.op", {"grpo_kernels.losses"})
    assert violations("grpo_kernels.batch", {"grpo_kernels.losses"})
    assert violations("grpo_kernels.losses.kl", {"grpo_kernels.fused"})
    assert violations("grpo_kernels.fused", {"grpo_trainer.trainer"})
    assert not violations("grpo_kernels.fused", {"grpo_kernels.losses.stage"})


def test_import_is_light() -> None:
    heavy = ("triton", "vllm", "transformers", "trl", "peft", "accelerate", "matplotlib")
    code = f"import sys, grpo_kernels; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_no_branch_on_a_loss_name_outside_the_registry() -> None:
    found = []
    for path in sources():
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "loss_type" in ast.dump(node.left):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
