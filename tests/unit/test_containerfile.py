"""`deploy/Containerfile`: what it copies is there and carried, and what it runs is in the wheel and the lock files."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from jobs.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/Containerfile").read_text()
LOCKS = ("cpu", "cuda")


def instructions():
    """Pairs of an instruction and its text, with continued lines joined."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]


def those(name):
    return [text for instruction, text in instructions() if instruction == name]


def locked(lock):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_each_source_is_there_and_part_of_the_context(lock):
    carried = {
        line.removeprefix("!") for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"
    }
    sources = [word.replace("${LOCK}", lock) for text in those("COPY") for word in text.split()[:-1]]
    assert {source.partition("/")[0] for source in sources} == carried
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_all_that_the_wheel_is_made_of_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    copied = {word for text in those("COPY") for word in text.split()[:-1]}
    assert copied >= {"pyproject.toml", project["project"]["readme"], "LICENSE", *packages}


def test_its_command_is_one_of_the_wheels_and_sagemakers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entrypoint,), (command,) = (json.loads(text) for name in ("ENTRYPOINT", "CMD") for text in those(name))
    assert entrypoint in project["scripts"]
    assert command in COMMANDS
    assert command == "serve"  # SageMaker: docker run IMAGE serve


def test_it_runs_as_a_user_whom_kubernetes_knows_not_to_be_root():
    (user,) = those("USER")
    assert int(user) > 0
    assert re.search(rf"useradd .*--uid {user}\b", TEXT)
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))


@pytest.mark.parametrize("lock", LOCKS)
def test_what_engines_and_the_wheel_are_compiled_with_is_there(lock):
    assert {"ninja", "setuptools"} <= locked(lock).keys()
    (packages,) = (text for text in those("RUN") if "apt-get install" in text)
    assert {"g++", "python3-dev", "libnuma1"} <= set(packages.split())


def test_the_compiler_of_cuda_is_the_release_that_torch_is_built_for():
    (base,) = re.findall(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-", TEXT)
    assert locked("cuda")["cuda-toolkit"].startswith(f"{base}.")


def test_the_commands_that_build_it_name_its_arguments():
    names = {text.partition("=")[0] for text in those("ARG")}
    pages = TEXT + (ROOT / "docs/deploy.md").read_text()
    named = re.findall(r"--build-arg (\w+)=", pages)
    assert set(named) >= {"BASE", "LOCK"}
    assert set(named) <= names
