"""What the packages import is declared, and what is not installed is named in one line."""

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
from typing import NamedTuple

import pytest
import yaml

from grpo_kernels.backends.cpu import _LIBRARY
from grpo_kernels.version import VERSION

ROOT = Path(__file__).parent.parent
OWN = ("grpo_kernels", "grpo_trainer")
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}  # where the module has another name
# a module that is itself imported only where its extra is installed
BEHIND_AN_EXTRA = {"nccl.py": "vllm"}

# what stands at the head of a module is needed to import it, what a function imports to call it
AT_IMPORT = {"grpo_kernels": (), "grpo_trainer": ("trainer",)}
IN_CALLS = {
    "grpo_kernels": ("tools", "trainer"),
    "grpo_trainer": ("trainer", "peft", "math", "vllm", "report", "deepspeed"),
}


class Import(NamedTuple):
    """One third-party package that one module imports."""

    module: Path
    package: str
    at_import: bool


def imports(path: Path, source: str) -> Iterator[Import]:
    """Find what ``source`` imports when it runs, so not what only a type checker reads."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            absolute = isinstance(node, ast.Import) or node.level == 0
            names = [alias.name for alias in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for package in {name.partition(".")[0] for name in names if absolute}:
                if package not in sys.stdlib_module_names and package not in OWN:
                    yield Import(path, package, at_import)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not inside)

    return walk(ast.parse(source), True)


HOSTS = ("axolotl", "torchtitan", "trl")  # of integrations: who uses one has its host


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


def undeclared(found: Import, known: dict[str, set[str]]) -> bool:
    package = found.module.relative_to(ROOT).parts[0]
    extras = (AT_IMPORT if found.at_import else IN_CALLS)[package]
    if found.module.name in BEHIND_AN_EXTRA:
        extras += (BEHIND_AN_EXTRA[found.module.name],)
    if found.module.parent.name == "integrations" and found.package in HOSTS:
        return False
    if found.package == "wandb":  # imported where a run is logged to it
        return False
    name = DISTRIBUTIONS.get(found.package, found.package).replace("_", "-")
    return not any(name in known[extra] for extra in ("", *extras))


@pytest.mark.parametrize("package", OWN)
def test_every_import_is_declared(package: str) -> None:
    known = declared()
    found = [
        each
        for path in sorted((ROOT / package).rglob("*.py"))
        for each in imports(path, path.read_text())
    ]
    assert {"torch"} <= {each.package for each in found}
    assert [each for each in found if undeclared(each, known)] == []


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


@pytest.fixture(scope="module")
def egg_info(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder with what an index shows, and the list of what the sdist holds."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder / "grpo_kernels.egg-info"


def test_the_sdist_holds_what_it_is_built_from_and_no_tests(egg_info: Path) -> None:
    files = set((egg_info / "SOURCES.txt").read_text().splitlines())
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").iterdir()}
    assert source | {"README.md", "LICENSE", "CHANGELOG.md", "setup.py"} <= files
    assert not [name for name in files if name.startswith("tests/")]


_LINK = re.compile(r"""(?:\]\(|\s(?:src|srcset|href)=["'])([^)"'\s]*)""")


def test_the_index_shows_no_link_into_the_repository(egg_info: Path) -> None:
    shown = (egg_info / "PKG-INFO").read_text(encoding="utf-8")
    links = _LINK.findall(shown)
    assert len(links) == len(_LINK.findall((ROOT / "README.md").read_text()))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert re.search(r"^Project-URL: ", shown, re.M) and re.search(r"^Author: ", shown, re.M)


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
    whole = "https://example.org"
    assert shown.count("https://here/raw/HEAD/docs/") == len("bcde")
    assert shown.count("https://here/blob/HEAD/") == len(("a", "LICENSE", "f"))
    assert _LINK.findall(shown)[-3:] == [whole, f"{whole}/h.svg", "#part"]


def test_one_version(egg_info: Path) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"\nVersion: {VERSION}\n" in (egg_info / "PKG-INFO").read_text(encoding="utf-8")
    assert citation["version"] == VERSION
    newest = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == VERSION


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    needed = {"cff-version", "message", "title", "type", "authors", "license", "repository-code"}
    assert needed <= citation.keys() and citation["cff-version"] == "1.2.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert citation["authors"] == project["authors"]


def test_one_wheel_serves_every_python() -> None:
    pytest.importorskip("setuptools")  # it brings distutils
    from distutils.core import run_setup

    distribution = run_setup(str(ROOT / "setup.py"), stop_after="init")
    wheel = distribution.get_command_obj("bdist_wheel")
    wheel.ensure_finalized()
    assert wheel.get_tag()[:2] == ("py3", "none")
    native = distribution.get_command_obj("build_ext").get_ext_filename("grpo_kernels._native")
    assert ROOT / native == _LIBRARY


def test_the_native_library_is_compiled_once_for_all_environments(tmp_path: Path) -> None:
    """The compiler is a stand-in that writes its arguments into its output and counts its calls."""
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
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
    assert calls_of_a_build("second") == 0
