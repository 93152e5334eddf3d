"""The workflows and forms of GitHub: they parse, and what they run and name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
PUBLISHES = {"id-token": "write"}


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]


def commands(path: Path) -> str:
    steps = (step for job in jobs(path).values() for step in job["steps"])
    return "\n".join(step.get("run", "") for step in steps)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    said = commands(path)
    assert set(re.findall(r"\bmake ([\w-]+)", said)) <= TARGETS
    assert [name for name in re.findall(r"\.ci/\w\S*", said) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_what_it_needs_and_ends(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [
            name for name in uses if not re.search(r"@(v\d+|[0-9a-f]{40}|release/v\d+)$", name)
        ] == []


def test_the_site_that_is_deployed_is_the_one_that_is_made() -> None:
    (made,) = re.findall(r"^site_dir: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    steps = jobs(GITHUB / "workflows/site.yml")["build"]["steps"]
    assert [step["with"]["path"] for step in steps if "path" in step.get("with", {})] == [made]


def test_only_a_tag_publishes() -> None:
    job = jobs(GITHUB / "workflows/wheels.yml")["publish"]
    assert "startsWith(github.ref, 'refs/tags/v')" in job["if"]
    assert job["permissions"] == PUBLISHES and set(job["needs"]) == {"wheel", "sdist"}


def test_cibuildwheel_finds_its_test() -> None:
    (command,) = re.findall(
        r'^test-command = ".*\{project\}/(\S+) ', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert (ROOT / command).exists()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_of_a_bug_requires_the_check(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    required = {
        field["id"] for field in form["body"] if field.get("validations", {}).get("required")
    }
    assert path.stem == "feature" or {"check", "info", "reproduce"} <= required
