from typing import Any

import pytest

from peagle.key_values import parse_pairs


def test_keys_are_stripped_and_values_kept() -> None:
    assert parse_pairs([" a = b=c ", "d="]) == {"a": " b=c ", "d": ""}
    assert parse_pairs([]) == {}


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        (["a"], {}, "'a' is not KEY=VALUE"),
        ([5], {"form": "NAME=FILE"}, "5 is not NAME=FILE"),
        (["=b"], {}, "'=b' is not KEY=VALUE"),
        (["a=b", " a=c"], {}, "a is given twice"),
        (["a-b=1", "A_B=2"], {"spelling": lambda key: key.lower().replace("-", "_")}, "a_b is given twice"),
    ],
)
def test_invalid_pairs_are_refused(pairs: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pairs(pairs, **options)
