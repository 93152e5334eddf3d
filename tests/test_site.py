"""The site of the documentation: its pages, its reference, and what becomes of links."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

import grpo_kernels
import grpo_trainer
from grpo_trainer.cli.train import run_parser
from grpo_trainer.config.fields import GRPOFields
from tests.support.browser import open_page

ROOT = Path(__file__).parents[1]
REFERENCE = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
LISTED = set(re.findall(r"^::: (\S+)$", "\n".join(REFERENCE.values()), re.M))
PACKAGES = (grpo_kernels, grpo_trainer)
PUBLIC = [f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    return importlib.import_module("pages")


def environment() -> dict[str, str]:
    """Return an environment in which this tree is imported, and kernels are compiled."""
    others = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return others | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    for name in NEEDED:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            pytest.skip(f"THE SITE IS NOT BUILT: {name} is not installed (pip install '.[docs]')")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    shown = "\n".join(path.read_text() for path in site.rglob("*.html"))
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', shown) == []
    assert "[[[" not in shown and ":::" not in shown and ":class:`" not in shown
    # links lead to pages, else to the repository
    assert re.findall(r'href="(?!https?:)[^"]*\.(?:md|py|yaml)[#"]', shown) == []
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    home = (site / "index.html").read_text()
    assert 'href="getting-started' in home
    for linked in ("blob/HEAD/docs/examples/lora.py", "tree/HEAD/tests/integrations"):
        assert f'href="{config["repo_url"]}/{linked}"' in shown


@pytest.mark.slow
def test_the_site_works_from_files(site: Path, tmp_path: Path) -> None:
    """Follow a link and search a word, though no server answers for folders."""
    home = open_page(site / "index.html", tmp_path, query="?q=old_logprobs")
    assert re.search(r"\d+ matching documents", home.dom)
    [link] = re.findall(r'<a href="([^"]+)" class="md-tabs__link">\s*Getting started', home.dom)
    followed = open_page(site / link, tmp_path)
    assert "<title>Getting started" in followed.dom
    assert home.console == followed.console == []


def test_every_public_name_is_on_a_page() -> None:
    # some functions have the name of their module
    paths = {name: {name, f"{name}.{name.rpartition('.')[2]}"} for name in PUBLIC}
    assert [name for name in PUBLIC if not paths[name] & LISTED] == []


def test_public_names_say_what_they_are() -> None:
    silent = []
    for name in PUBLIC:
        package, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(package), attribute)
        members = vars(found) if inspect.isclass(found) else {}
        public = [found, *(getattr(found, x) for x, y in members.items() if _is_method(x, y))]
        silent += [(name, part) for part in public if not inspect.getdoc(part)]
    assert silent == []


def _is_method(name: str, value: Any) -> bool:
    kinds = (classmethod, staticmethod, property)
    return name[0] != "_" and (inspect.isfunction(value) or isinstance(value, kinds))


def test_names_on_the_reference_exist() -> None:
    hosts = {"trl_trainer", "verl", "torchtitan", "axolotl"}  # import what may not be here
    for name in LISTED:
        module, _, attribute = name.rpartition(".")
        if module.rpartition(".")[2] not in hosts:
            importlib.import_module(module)
            assert hasattr(sys.modules[module], attribute), name


def test_the_settings_page_has_every_option(pages: ModuleType) -> None:
    pytest.importorskip("mkdocs", reason="THE PAGE OF SETTINGS IS NOT CHECKED: no mkdocs")
    written = importlib.import_module("hooks")._settings()
    options = {item.dest for item in run_parser()._actions} - {"help", "config"}
    assert [name for name in options if f"`{name}`" not in written] == []
    described = set(re.findall(r"^#### `(\w+)`\n\n`[^`]+`.*\. [`A-Z1].+", written, re.M))
    assert described == options - set(TrainingArguments.__dataclass_fields__) | set(
        GRPOFields.__dataclass_fields__
    )
    assert (
        "#### `dtype`\n\n`auto or bfloat16 or float16 or float32`, default `float32`. Dtype of"
    ) in written


def test_links_are_resolved_but_those_in_code(pages: ModuleType) -> None:
    text = """\
[a `b`](docs/c.md#d) `[no](code.md)` ![e](f.png "title")
<picture><source srcset="dark.svg"><img src="light.svg"></picture>

```python
x["a"](b.md)
```
[name]: there.md
"""
    found: list[tuple[str, bool]] = []

    def resolve(link: str, html: bool) -> str:
        found.append((link, html))
        return "X"

    changed = pages.relinked(text, resolve)
    assert found == [
        ("docs/c.md#d", False), ("f.png", False), ("dark.svg", True), ("light.svg", True),
        ("there.md", False),
    ]  # fmt: skip
    assert "[a `b`](X)" in changed and '![e](X "title")' in changed and "[name]: X" in changed
    assert "`[no](code.md)`" in changed and 'x["a"](b.md)' in changed


def test_lists_are_nested_as_the_site_reads_them(pages: ModuleType) -> None:
    github = """\
Words:
* one
  ```bash
  make
  ```
  - inner

1. first
   goes on
2. second

    code
"""
    site = """\
Words:

* one
    ```bash
    make
    ```
    - inner

1. first
    goes on
2. second

     code
"""
    assert pages.as_site_reads(github) == site


def test_a_notebook_is_a_page(pages: ModuleType) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {
            "cell_type": "code",
            "source": "print(1)",
            "outputs": [{"text": ["1\n"]}, {"data": {"image/png": "QUJD\n"}}],
        },
    ]
    page = pages.notebook(json.dumps({"cells": cells}))
    assert page.startswith("# Title\nwords\n\n```python\nprint(1)\n```\n\n")
    assert '```text title="Output"\n1\n```' in page and "base64,QUJD" in page
