"""The files around the code: workflows, forms, citation, container."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML comes with Flax")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(p for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config")
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path: Path) -> None:
    """They can only read unless a job says more, end, and run targets that the Makefile has."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@[\w/.-]+", step.get("uses", "a/b@c"))
        for target in re.findall(r"^make (\S+)", step.get("run", ""), re.MULTILINE):
            assert target in targets


def test_ci_runs_what_a_fresh_clone_must_pass() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "ci.yml")
    commands = [step.get("run") for step in steps(workflow)]
    local = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert {*local, "make docs"} <= set(commands)
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_a_release_is_published_without_a_token() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "release.yml")
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert PROJECT["name"] == "batch-invariant-jax"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert any(field.get("validations", {}).get("required") for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in fields)


def test_there_are_workflows_and_forms() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "release"}
    assert {path.stem for path in FORMS} == {"bug", "feature", "speed", "wrong_bits"}


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def test_the_container() -> None:
    """What a linter asks for: a pinned base, files that exist and are sent, a user, a command as a list."""
    found = instructions()
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} <= known
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", found[0][1])
    sent = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    copied = [source for name, value in found if name == "COPY" for source in value.split()[:-1]]
    assert sorted(copied) == sorted(sent)
    assert all((ROOT / source).exists() for source in copied)
    names = [name for name, _ in found]
    assert names.index("USER") < names.index("ENTRYPOINT")
    for name, value in found:
        if name in ("ENTRYPOINT", "CMD"):
            assert json.loads(value)
        if name == "EXPOSE":
            from bijax.server.options import ServerOptions

            assert int(value) == ServerOptions().port
    extras = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert extras
    assert {extra for one in extras for extra in one.split(",")} <= PROJECT["optional-dependencies"].keys()
    model = (ROOT / "scripts" / "setup.sh").read_text().partition('model="')[2].partition('"')[0]
    assert model in DOCKERFILE


@pytest.mark.tier("full")
def test_the_container_is_built() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("needs docker and its daemon; test_the_container reads the file")
    build = [docker, "build", "--quiet", str(ROOT)]
    image = subprocess.run(build, capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run([docker, "run", "--rm", image, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("bijax ")
