"""The container recipe and the CI workflow can be read, and what they name exists. Neither is built
or run here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dat.tools.selftest.registry import select
from tests.docs.resolving import resolve

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, in order."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in pairs]


def workflow() -> dict[Any, Any]:
    parsed: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return parsed


def steps(job: str) -> list[dict[str, Any]]:
    return list(workflow()["jobs"][job]["steps"])


def shell_lines(job: str) -> list[str]:
    return [line.strip() for step in steps(job) for line in step.get("run", "").splitlines()]


def dat_commands(lines: list[str]) -> list[list[str]]:
    """The words after `dat` in commands that call it, with a number for each shell variable."""
    words = [shlex.split(re.sub(r'"?\$\w+"?', "2", line)) for line in lines]
    return [word[1:] for word in words if word and re.fullmatch(r"(\S*/)?dat", word[0])]


def test_the_recipe_has_only_known_instructions() -> None:
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    first = next(name for name, _ in found if name != "ARG")
    assert first == "FROM" and found[-1][0] == "CMD"
    (image,) = [rest for name, rest in found if name == "FROM"]
    assert image.startswith("nvidia/cuda:")


def test_the_recipe_copies_files_that_exist() -> None:
    """And all that the project's build names."""
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    names = {name for sources in copied for name in sources}
    assert all((ROOT / name).exists() for name in names)
    manifest = (ROOT / "MANIFEST.in").read_text()
    assert set(re.findall(r"^include (.*)$", manifest, re.M)[0].split()) <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= names


def test_the_recipe_runs_the_self_test_on_cuda() -> None:
    (command,) = [rest for name, rest in instructions() if name == "CMD"]
    program, *words = json.loads(command)
    assert program == "dat"
    arguments = resolve(words)
    assert words[0] == "selftest" and arguments.device == "cuda"
    assert select(arguments.only)


def test_the_recipe_and_the_constraints_name_the_same_torch() -> None:
    (pinned,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert ("ARG", f'TORCH="{pinned}"') in instructions()


def test_cpu_runners_make_targets_that_exist() -> None:
    job = workflow()["jobs"]["cpu"]
    targets = job["strategy"]["matrix"]["target"]
    assert targets == ["test", "test-slow"]
    assert f"make {'${{ matrix.target }}'}" in shell_lines("cpu")
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_the_gpu_runner_is_only_waited_for_on_request() -> None:
    job = workflow()["jobs"]["gpu"]
    assert "self-hosted" in job["runs-on"] and "gpu" in job["runs-on"]
    condition = job["if"]
    assert "workflow_dispatch" in condition and "inputs.gpu" in condition
    assert "pull_request" not in condition
    triggers = workflow()[True]  # YAML 1.1 reads the key `on` as a boolean
    assert triggers["workflow_dispatch"]["inputs"]["gpu"]["default"] is False


def test_the_gpu_runner_runs_commands_that_exist() -> None:
    commands = dat_commands(shell_lines("gpu"))
    assert [words[0] for words in commands] == ["doctor", "selftest", "selftest"]
    for words in commands:
        resolve(words)
    assert all(resolve(words).device == "cuda" for words in commands[1:])


def test_every_step_has_something_to_do() -> None:
    for job, settings in workflow()["jobs"].items():
        assert settings["timeout-minutes"] <= 60
        for step in steps(job):
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


@pytest.mark.parametrize("wrong", ["dat selftset --device cuda", "dat selftest --gpu"])
def test_a_wrong_command_would_be_noticed(wrong: str) -> None:
    (words,) = dat_commands([wrong])
    with pytest.raises(SystemExit):
        resolve(words)
