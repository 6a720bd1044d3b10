from typing import Any

import pytest
from pydantic import ValidationError

from peagle.catalog.cards import StepTable, load_catalog

TABLE: dict[str, Any] = {
    "platform": "cpu", "precision": "bf16", "source": "here", "concurrency": [1, 8],
    "rows": [
        {"method": "none", "num_speculative_tokens": 0, "step_ms": [20.0, 40.0]},
        {"method": "peagle", "num_speculative_tokens": 3, "step_ms": [30.0, 80.0]},
        {"method": "peagle", "num_speculative_tokens": 7, "step_ms": [40.0, 160.0]},
    ],
}  # fmt: skip


def test_a_step_that_takes_half_as_long_again_needs_half_a_token_more() -> None:
    assert StepTable(**TABLE).break_even("peagle", 3) == {1: 1.5, 8: 2.0}


def test_between_two_measured_k_it_lies_between_and_beyond_them_nothing_is_known() -> None:
    table = StepTable(**TABLE)
    assert table.break_even("peagle", 5) == pytest.approx({1: 1.75, 8: 3.0})
    assert [table.break_even(*unknown) for unknown in (("peagle", 1), ("peagle", 8), ("eagle3", 3))] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"method": "none", "num_speculative_tokens": 0, "step_ms": [20.0]}], "a time per concurrency"),
        ([{"method": "none", "num_speculative_tokens": 0, "step_ms": [20.0, 0.0]}], "above zero"),
        (TABLE["rows"][1:], "one row with method none"),
        ([*TABLE["rows"], TABLE["rows"][2]], "one per other method and K"),
        ([TABLE["rows"][0] | {"spread": [0.1]}], "a value per concurrency"),
    ],
)
def test_a_table_that_is_not_whole_is_refused(rows: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        StepTable(**{**TABLE, "rows": rows})


def test_concurrencies_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValidationError, match="concurrencies must ascend"):
        StepTable(**{**TABLE, "concurrency": [8, 1]})


def test_the_embedded_default_knows_what_its_heads_need() -> None:
    card = load_catalog().get("smollm2-135m")
    (table,) = card.steps
    for row in card.speculation:
        needed = table.break_even(row.method, row.num_speculative_tokens)
        assert set(needed) == set(table.concurrency)
        assert all(1 < length < row.num_speculative_tokens + 1 for length in needed.values())
