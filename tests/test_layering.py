"""The rules of the house: imports go downward, through doors, without circles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.support.import_graph import (
    PACKAGES,
    Import,
    circles,
    floors,
    imports,
    module_graph,
    modules,
    room,
    room_graph,
)
from tests.support.plain_code import names_of_functions, starred, tokens_per_line, unnamed

# room: the rooms of its package that it may know; a room that is not named here may know all
KERNELS = {
    "common": "",
    "batch": "common",
    "head": "common",
    "losses": "common batch",
    "backends": "batch head",
    "engine": "common batch head backends",
    "schedule": "common batch head backends losses engine",
    "linear_logprobs": "common batch head backends engine",
    "linear_policy_loss": "batch head losses engine schedule",
    "linear_divergence": "common batch head backends engine",
    "fused_head": "common batch head losses linear_logprobs linear_policy_loss linear_divergence",
    "warm_up": "batch head losses schedule linear_policy_loss",
    "hf": "common head fused_head",
    "integrations": "common batch head losses linear_logprobs linear_policy_loss linear_divergence "
    "fused_head hf",
    "testing": "batch losses linear_policy_loss",
}
TRAINER = {
    "common": "",
    "masking": "",
    "config": "common masking",
    "data": "common config",
    "policy": "common masking config data",
    "monitor": "common masking config data",
    "report": "common monitor",
    "checkpoint": "common masking config data policy monitor",
    "rewards": "common config policy monitor",
    "engines": "common config data policy monitor",
    "vllm": "common masking config data policy monitor engines",
    "generation": "vllm",
    "agents": "common config data monitor rewards engines",
    "experience": "common config data policy monitor rewards engines agents",
    "base": "common config data policy monitor checkpoint",
    "assemble": "common config data policy monitor report rewards engines vllm agents experience",
    "trl_names": "config experience rewards assemble",
}
ROOMS = {
    f"{package}.{name}": {f"{package}.{below}" for below in known.split()}
    for package, rooms in {"grpo_kernels": KERNELS, "grpo_trainer": TRAINER}.items()
    for name, known in rooms.items()
}
# nobody knows what stands at the top
TOP = ("grpo_kernels.tools", "grpo_trainer.cli", "grpo_trainer.demo")
# packages, from the bottom: each may know those before it
ORDER = {package: PACKAGES[: i + 1] for i, package in enumerate(PACKAGES)}

# what decides which code runs is an object of a registry; nobody asks for its name
NAMES = r"(?<!for )\b(?:loss_type|surrogate|kind|backend)(?:\.name)?"
TEXT = r"[(\[{]?[\"'](?!auto)"
BRANCH = re.compile(
    rf"{NAMES} (?:[=!]=|(?:not )?in) {TEXT}|[\"'] [=!]= \S*{NAMES}\b|match \S*{NAMES}:|"
    rf"isinstance\(\S*{NAMES}, (?!type\b|Surrogate\b|str\b)"
)


def why_wrong(found: Import) -> str | None:
    """Say which rule an import breaks."""
    package, other = found.by.split(".")[0], found.module.split(".")[0]
    if other not in ORDER[package]:
        return f"{package} may not know {other}"
    if package in PACKAGES[2:] or found.by == package or room(found.by) == room(found.target):
        return None
    if package == other and found.target != package:
        if room(found.target) not in ROOMS.get(room(found.by), {room(found.target)}):
            return f"{room(found.by)} may not know {room(found.target)}"
        if room(found.target) in TOP and room(found.by) not in TOP:
            return f"{room(found.target)} stands at the top"
    return None if through_a_door(found) else f"{found.module} is no door"


def through_a_door(found: Import) -> bool:
    """Return whether what is imported stands in the ``__init__`` of a folder, or beside folders."""
    path = modules().get(found.module)
    if path is None or path.stem != "__init__":
        return len(found.module.split(".")) == 2
    if modules()[found.target].stem == "__init__" or len(found.target.split(".")) == 2:
        return True
    return found.target in {shown.target for shown in imports(found.module)}


@pytest.mark.parametrize("module", modules())
def test_imports_go_downward_and_through_doors(module: str) -> None:
    wrong = [(found.line, why_wrong(found)) for found in imports(module)]
    assert [each for each in wrong if each[1] is not None] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle(package: str) -> None:
    assert circles(module_graph(package)) == []


def test_what_is_imported_by_a_call_counts() -> None:
    """So that a circle cannot hide in one."""
    below = module_graph("grpo_kernels")["grpo_kernels.backends.packing"]
    assert "grpo_kernels.backends.triton" in below


def test_every_room_exists() -> None:
    named = {*ROOMS, *TOP, *(below for known in ROOMS.values() for below in known)}
    assert named <= {room(module) for module in modules()}


def test_kernels_stay_few_rooms_on_few_floors() -> None:
    rooms = room_graph("grpo_kernels")
    assert set(rooms) <= {*ROOMS, *TOP}  # of a room that is not in the table no rule is checked
    assert len(rooms) <= 16
    assert floors(rooms) <= 9


@pytest.mark.parametrize(
    ("by", "module", "name"),
    [
        ("grpo_kernels.losses.terms", "grpo_kernels.engine", "chunked_loop"),
        ("grpo_kernels.linear_policy_loss", "grpo_trainer", "GRPOTrainer"),
        ("grpo_kernels.schedule.loss_plan", "grpo_kernels.tools", "machine"),
        ("grpo_kernels.schedule.loss_plan", "grpo_kernels.engine.rows", "Rows"),
        ("grpo_trainer.trainer", "benchmarks.timing", "median"),
    ],
)
def test_the_rules_catch(by: str, module: str, name: str) -> None:
    assert why_wrong(Import(by, module, name, 1)) is not None


def test_import_is_light() -> None:
    heavy = ("triton", "vllm", "transformers", "trl", "peft", "accelerate", "matplotlib", "psutil")
    code = f"import sys, grpo_kernels; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES[:2])
def test_no_branch_on_a_name(package: str) -> None:
    sources = {n: path.read_text() for n, path in modules().items() if n.startswith(package)}
    assert {n: found for n, text in sources.items() if (found := BRANCH.findall(text))} == {}


def test_calls_of_kernels_are_plain() -> None:
    paths = [path for name, path in modules().items() if name.startswith("grpo_kernels")]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    functions = names_of_functions(trees)
    assert [
        (path.name, each) for path, tree in trees.items() for each in unnamed(tree, functions)
    ] == []
    assert sum(len(list(starred(tree))) for tree in trees.values()) <= 1


def test_calls_that_are_not_plain() -> None:
    tree = ast.parse(
        "def f(x):\n    size, more = (x, x), 1\n    f(*size, more)\n    f(1, 2, 3, 4, 5)\n"
    )
    assert len(list(unnamed(tree, {"f"}))) == len(list(starred(tree))) == 1


@pytest.mark.parametrize("package", ("grpo_kernels", "grpo_trainer"))
def test_lines_are_not_squeezed(package: str) -> None:
    paths = [path for name, path in modules().items() if name.startswith(package)]
    assert tokens_per_line(path.read_text() for path in paths) <= 9.0


def test_tokens_of_a_line() -> None:
    assert tokens_per_line(['"""Text."""\nimport os\n\nx = 1  # one\ny, z = x, 2\n']) == 5
