"""The files, commands and packages that `deploy/Containerfile` uses exist."""

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
    """Return pairs of an instruction and its arguments, with continued lines joined."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]


def texts_of(name):
    return [text for instruction, text in instructions() if instruction == name]


def locked_versions(lock):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_copied_sources_exist(lock):
    included = {
        line.removeprefix("!") for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"
    }
    sources = [word.replace("${LOCK}", lock) for text in texts_of("COPY") for word in text.split()[:-1]]
    assert {source.partition("/")[0] for source in sources} == included
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_wheel_sources_are_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    copied = {word for text in texts_of("COPY") for word in text.split()[:-1]}
    assert copied >= {"pyproject.toml", project["project"]["readme"], "LICENSE", *packages}


def test_image_runs_peagle_serve_by_default():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entrypoint,), (command,) = (json.loads(text) for name in ("ENTRYPOINT", "CMD") for text in texts_of(name))
    assert entrypoint in project["scripts"]
    assert command in COMMANDS
    assert command == "serve"  # SageMaker runs `docker run IMAGE serve`


def test_image_has_a_numeric_non_root_user():
    (user,) = texts_of("USER")
    assert int(user) > 0
    assert re.search(rf"useradd .*--uid {user}\b", TEXT)
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))


@pytest.mark.parametrize("lock", LOCKS)
def test_compilers_are_installed(lock):
    assert {"ninja", "setuptools"} <= locked_versions(lock).keys()
    (packages,) = (text for text in texts_of("RUN") if "apt-get install" in text)
    assert {"g++", "python3-dev", "libnuma1"} <= set(packages.split())


def test_cuda_release_matches_torch():
    (base,) = re.findall(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-", TEXT)
    assert locked_versions("cuda")["cuda-toolkit"].startswith(f"{base}.")
