"""What a package declares and builds, and what GitHub's workflows run.

What an sdist, a wheel and an index hold is checked where they are built: ``make packages``.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_kernels.common import VERSION

ROOT = Path(__file__).parent.parent
OWN = ("grpo_kernels", "grpo_trainer")
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}  # where the module has another name
# a module that is itself imported only where its extra is installed
BEHIND_AN_EXTRA = {"nccl.py": ("vllm",)}
HOSTS = ("axolotl", "torchtitan", "trl")  # of integrations: who uses one has its host
# what stands at the head of a module is needed to import it, what a function imports to call it
AT_IMPORT = {"grpo_kernels": (), "grpo_trainer": ("trainer",)}
IN_CALLS = {
    "grpo_kernels": ("tools", "trainer"),
    "grpo_trainer": ("trainer", "peft", "math", "vllm", "report", "deepspeed"),
}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each third-party package that a module imports, and whether that is at its own import.

    What only a type checker reads does not count.
    """

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            absolute = isinstance(node, ast.Import) or node.level == 0
            names = [alias.name for alias in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for package in {name.partition(".")[0] for name in names if absolute}:
                if package not in sys.stdlib_module_names and package not in OWN:
                    yield package, at_import
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not inside)

    return walk(ast.parse(path.read_text()), True)


def declared() -> dict[str, set[str]]:
    """Read what ``pyproject.toml`` installs: without an extra under "", and by extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}

    def names(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in lists[extra]:
            own = re.match(r"grpo-kernels\[(.+)\]$", requirement)
            if own is not None:
                found = found.union(*(names(each) for each in own[1].split(",")))
            else:
                found.add(re.split(r"[^\w.-]", requirement)[0].lower())
        return found

    return {extra: names(extra) for extra in lists}


@pytest.mark.parametrize("name", OWN)
def test_every_import_is_declared(name: str) -> None:
    known = declared()
    undeclared = []
    for path in sorted((ROOT / name).rglob("*.py")):
        own = BEHIND_AN_EXTRA.get(path.name, ())
        hosts = HOSTS if path.parent.name == "integrations" else ()
        for package, at_import in imports(path):
            extras = ("", *(AT_IMPORT if at_import else IN_CALLS)[name], *own)
            distribution = DISTRIBUTIONS.get(package, package).replace("_", "-")
            if package in hosts or package == "wandb":  # imported where a run is logged to it
                continue
            if not any(distribution in known[extra] for extra in extras):
                undeclared.append((path, package))
    assert undeclared == [] and "torch" in known[""]


def test_the_trainer_without_its_packages_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\nfrom grpo_trainer.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "grpo-train: error: expected the package transformers to be installed; pip install "
    )


@pytest.mark.parametrize("file", ["oldest_torch.txt", "backends/old_triton.txt"])
def test_the_oldest_version_is_the_one_that_is_tested(file: str) -> None:
    [(name, version)] = re.findall(
        r"^(torch|triton)==(\S+)$", (ROOT / "tests" / file).read_text(), re.M
    )
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'"{name}>={re.escape(version)}[";]', text)


_HERE = """[text](docs/a.md#part), [![badge](docs/b.svg)](LICENSE), ![picture](docs/c.png)
<picture><source media="(prefers-color-scheme: dark)" srcset="docs/d.svg">
<img alt="d" src="docs/e.svg"></picture> <a href="docs/f.md">f</a>
[g](https://example.org) <img src='https://example.org/h.svg'> [i](#part)"""


def test_links_in_html_and_around_pictures_are_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(_HERE)
    (tmp_path / "pyproject.toml").write_text('[project]\nurls.Repository = "https://here"\n')
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    script = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.setitem(script["readme"].__globals__, "ROOT", tmp_path)
    shown = script["readme"]()
    assert shown.count("https://here/raw/HEAD/docs/") == len("bcde")
    assert shown.count("https://here/blob/HEAD/") == len(("a", "LICENSE", "f"))
    assert "[g](https://example.org) <img src='https://example.org/h.svg'> [i](#part)" in shown


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["cff-version"] == "1.2.0"
    newest = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == VERSION
    assert {"message", "title", "type"} <= citation.keys()
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert citation["authors"] == project["authors"]


def test_the_native_library_is_compiled_once_for_all_environments(tmp_path: Path) -> None:
    """The compiler is a stand-in that writes its arguments into its output and counts its calls."""
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    common = tmp_path / "grpo_kernels/common"
    common.mkdir(parents=True)  # its version is read, or what is installed is imported
    shutil.copy(ROOT / "grpo_kernels/common/version.py", common)
    sources = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version) exit;; *" -c "*) echo >>{calls};; esac\n'
        'for word; do [ "$last" = -o ] && echo "$*" >"$word"; last=$word; done\n'
    )
    compiler.chmod(0o755)

    def calls_of_a_build(environment: str, flags: str = "") -> int:
        calls.write_text("")
        build = ["build", "--build-base", environment, "--build-lib", environment]
        variables = os.environ | {"CC": str(compiler), "CXX": str(compiler), "CXXFLAGS": flags}
        command = [sys.executable, "setup.py", "-q", *build]
        subprocess.run(command, cwd=tmp_path, env=variables, check=True)
        assert flags in (tmp_path / environment / "grpo_kernels/_native.so").read_text()
        return len(calls.read_text())

    everything = len(list(sources.glob("*.cpp")))
    assert calls_of_a_build("first") == everything
    assert calls_of_a_build("second") == 0
    assert calls_of_a_build("second", flags="-O0") == everything
    (sources / "rows.h").write_text("// another")
    assert calls_of_a_build("first") == everything


GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in GITHUB.glob("workflows/*.yml")}


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_runs_what_is_there_may_do_little_and_ends(name: str) -> None:
    workflow: dict[str, Any] = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert re.search(r"@(v\d+|[0-9a-f]{40}|release/v\d+)$", step.get("uses", "@v1"))
            command = step.get("run", "")
            assert set(re.findall(r"\bmake ([\w-]+)", command)) <= targets
            scripts = re.findall(r"\.ci/\w\S*", command)
            assert all((ROOT / script).exists() for script in scripts)


def test_only_a_tag_publishes_and_the_site_is_the_one_that_is_made() -> None:
    publish = WORKFLOWS["wheels"]["jobs"]["publish"]
    assert "startsWith(github.ref, 'refs/tags/v')" in publish["if"]
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"wheel", "sdist"}
    made = re.findall(r"^site_dir: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    steps = WORKFLOWS["site"]["jobs"]["build"]["steps"]
    assert [step["with"]["path"] for step in steps if "path" in step.get("with", {})] == made


def test_forms_of_bugs_require_the_check() -> None:
    for name in ("bug", "wrong_numbers"):
        form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        required = [x["id"] for x in form["body"] if x.get("validations", {}).get("required")]
        assert {"check", "info", "reproduce"} <= set(required)
