"""Run each code block of the pages in docs/tutorials, in an empty folder and with the real engine.

`pytest -m soak -s tests/integration/test_tutorials.py` prints the outputs, from which the pages quote.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from peagle.catalog.folders import peagle_home
from peagle.ports import free_port

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LIMIT_S = 600  # for each command; the pages promise shorter times
pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * LIMIT_S)]


def commands(page):
    """Return the commands of a page as argument lists for `subprocess.run`."""
    shells = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [[*shells[language], source] for language, source in blocks if language in shells]


@pytest.fixture
def environment():
    """Environment variables: PATH with this interpreter's commands, and PEAGLE_PORT with a free port."""
    port = str(free_port("127.0.0.1"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    yield os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PEAGLE_PORT": port}
    for record in (peagle_home() / "endpoints").glob("*/endpoint.json"):  # after a failed test
        endpoint = json.loads(record.read_text())
        if f":{port}/" in endpoint["url"] and psutil.pid_exists(endpoint["pid"]):
            psutil.Process(endpoint["pid"]).terminate()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_of_a_tutorial_succeed(page, tmp_path, environment):
    assert shutil.which("peagle", path=environment["PATH"]), "peagle is not installed: make setup"
    for command in commands(page):
        *shell, source = command
        source = source.replace("127.0.0.1:8000", f"127.0.0.1:{environment['PEAGLE_PORT']}")
        result = subprocess.run(
            [*shell, source],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        sys.stdout.write(f"\n$ {source}\n{result.stdout}")
        assert result.returncode == 0
