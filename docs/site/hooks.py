"""Add pages from outside docs/, such as README, and resolve links that leave docs/."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# pages outside docs/ and their paths on the site
ELSEWHERE = {
    "README.md": "index.md",
    "benchmarks/README.md": "numbers/index.md",
    "benchmarks/results.md": "numbers/results.md",
    "benchmarks/kernels.md": "numbers/kernels.md",
    "benchmarks/method.md": "numbers/method.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
PICTURES = "benchmarks/results/*/*.png"

log = logging.getLogger("mkdocs.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and pictures from outside docs/, and a page for each notebook."""
    for source, page in ELSEWHERE.items():
        files.append(_file(config, page, ROOT / source))
    for picture in sorted(ROOT.glob(PICTURES)):
        place = picture.relative_to(ROOT / "benchmarks").as_posix()
        files.append(_file(config, place, picture))
    docs = Path(config.docs_dir)
    for source in sorted(docs.rglob("*.ipynb")):
        page = source.relative_to(docs).with_suffix(".md").as_posix()
        files.append(_file(config, page, source))
    return files


def _file(config: MkDocsConfig, place: str, source: Path) -> File:
    file = File.generated(config, place, abs_src_path=str(source))
    file.edit_uri = os.path.relpath(source, config.docs_dir)
    return file


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert a page from GitHub Markdown to the site's Markdown."""
    if page.parent is None:  # a page without siblings
        page.meta.setdefault("hide", ["navigation"])
    source = _source(page.file)
    if source is not None and source.suffix == ".ipynb":
        markdown = pages.notebook(source.read_text(encoding="utf-8"))
    markdown = pages.as_site_reads(pages.without_markers(markdown))
    markdown = re.sub(r"^<!-- help: (.+?) -->$", _help, markdown, flags=re.M)
    if "<!-- settings -->" in markdown:
        markdown = markdown.replace("<!-- settings -->\n", _settings() + "\n")
    built = [file for file in files if not file.inclusion.is_excluded()]
    here = {place: file for file in built if (place := _source(file)) is not None}

    def resolve(link: str, html: bool) -> str:
        if re.match(r"[a-zA-Z][\w+.-]*:|#|//", link) or source is None:
            return link
        path, mark, anchor = link.partition("#")
        place = (source.parent / unquote(path)).resolve()
        if place in here:
            return _within(here[place], page.file, html) + mark + anchor
        if not place.exists() or ROOT not in place.parents:
            log.warning("%s: there is no %s", source.relative_to(ROOT), link)
            return link
        kind = "tree" if place.is_dir() else "blob"
        address = f"{config.repo_url}/{kind}/HEAD/{place.relative_to(ROOT).as_posix()}"
        return address + mark + anchor

    return pages.relinked(markdown, resolve)


def _source(file: File) -> Path | None:
    return None if file.abs_src_path is None else Path(file.abs_src_path).resolve()


def _within(file: File, page: File, html: bool) -> str:
    if html:
        return file.url_relative_to(page)
    return posixpath.relpath(file.src_uri, posixpath.dirname(page.src_uri) or ".")


def _help(found: re.Match[str]) -> str:
    """Return a command's help, at a fixed width."""
    command, *words = found[1].split()
    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            _main(command)([*words, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return f"```text\n{said.getvalue().rstrip()}\n```"


def _settings() -> str:
    """Describe the arguments of a run, grouped by class."""
    from transformers import TrainingArguments

    from grpo_trainer.cli.arguments import ModelConfig, RunArguments, ScriptArguments
    from grpo_trainer.cli.train import run_parser
    from grpo_trainer.config.fields import GRPOFields
    from grpo_trainer.config.loss import LossFields

    actions = {action.dest: action for action in reversed(run_parser()._actions)}
    parts = []
    for owner in (ModelConfig, ScriptArguments, RunArguments, GRPOFields, LossFields):
        title = owner.__doc__.partition("\n")[0].rstrip(".")
        names = [name for name in owner.__dataclass_fields__ if name in actions]
        parts.append(pages.settings(title, [actions.pop(name) for name in names]))
    names = [f"`{name}`" for name in TrainingArguments.__dataclass_fields__ if name in actions]
    parts.append(f"## From transformers\n\n`grpo-train --help-all` describes {', '.join(names)}.")
    return "\n\n".join(parts)


def _main(command: str) -> Any:
    if command == "grpo-kernels":
        from grpo_kernels.tools.cli import main
    else:
        from grpo_trainer.cli import main
    return main
