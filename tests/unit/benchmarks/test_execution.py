"""HumanEval by execution: what passes, what does not, and what a sandbox keeps from an answer."""

import pytest

from benchmarks.precision.execution import passes, program_of
from peagle.humaneval import read_humaneval

PROBLEM = {
    "prompt": "import math\n\n\ndef area(r):\n    '''The area of a circle.'''\n",
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
}
RIGHT = "def area(r):\n    return math.pi * r * r\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (RIGHT, True),
        (f"Here you are:\n```python\n{RIGHT}```\nIt works.", True),
        (f"```\n{RIGHT}", True),  # cut before the fence ends
        ("    return math.pi * r ** 2\n", True),  # goes on from the prompt
        ("def area(r):\n    return r\n", False),
        ("def area(r:\n", False),
        ("", False),
        (f"{RIGHT}\nimport sys\nsys.exit(0)", False),
    ],
)
def test_an_answer_passes_where_its_code_does(answer: str, expected: bool) -> None:
    assert passes(PROBLEM, answer) == expected


@pytest.mark.parametrize(
    "tried",
    [
        "import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)",
        "with open('file', 'w') as file: file.write('x')",
        "import os; os.system('true')",
        "x = bytearray(3 << 30)",
        "import os; os.environ['PATH']",
    ],
)
def test_a_sandbox_keeps_much_from_an_answer(tried: str) -> None:
    assert not passes(PROBLEM, f"{tried}\n{RIGHT}")


def test_an_answer_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.precision.execution._LIMIT_S", 1)
    assert not passes(PROBLEM, f"while True:\n    pass\n{RIGHT}")


def test_the_reference_solutions_pass() -> None:
    problems = read_humaneval()
    for problem in [problems[0], problems[38], problems[50]]:  # the last two have a helper before the function
        assert passes(problem, problem["prompt"] + problem["canonical_solution"])
        assert passes(problem, problem["canonical_solution"])


def test_the_function_of_the_prompt_is_not_defined_twice() -> None:
    assert program_of(PROBLEM, RIGHT).count("def area(") == 1
    assert program_of(PROBLEM, "    return 1\n").count("def area(") == 1
