import json
from typing import Any

import pytest

from peagle.bench.acceptance_cells import UNCATEGORISED, CategoryResult, CellResult, by_category, merged_speculation
from peagle.engine.interface import Generation
from peagle.errors import EngineError
from peagle.speculation import SpeculationStats

from .conftest import result


def stats(num_drafts: int, *accepted: int) -> SpeculationStats:
    return SpeculationStats(
        num_drafts=num_drafts, num_draft_tokens=num_drafts * len(accepted), accepted_per_position=accepted
    )


def generation(speculation: SpeculationStats | None, num_output_tokens: int = 5) -> Generation:
    return Generation(
        text="", finish_reason="stop", num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=num_output_tokens,
        speculation=speculation, ttft_s=None, latency_s=None,
    )  # fmt: skip


def test_figures_of_a_cell_by_hand() -> None:
    cell = result()
    assert cell.acceptance_length == pytest.approx(1 + 11 / 10)
    assert cell.drafted_tokens_per_s == 15
    assert cell.accepted_tokens_per_s == 5.5
    assert cell.output_tokens_per_s == 10.5


def test_a_cell_survives_json() -> None:
    category = CategoryResult(num_responses=1, num_output_tokens=4, speculation=stats(3, 2, 1))
    cell = result(by_category={"maths": category})
    assert CellResult.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell


def test_drafts_of_responses_are_merged_and_win_over_the_engines_count() -> None:
    merged = merged_speculation([generation(stats(2, 1, 0)), generation(stats(3, 3, 2)), generation(None)], stats(9, 9))
    assert merged == stats(5, 4, 2)


def test_without_drafts_by_response_the_engines_count_is_taken() -> None:
    assert merged_speculation([generation(None)], stats(9, 4)) == stats(9, 4)


@pytest.mark.parametrize(("known", "totals"), [(None, None), (SpeculationStats.empty(), None), (None, stats(0, 0))])
def test_nothing_drafted_is_an_error_and_not_a_length_of_one(known: Any, totals: Any) -> None:
    with pytest.raises(EngineError, match="drafted nothing"):
        merged_speculation([generation(known)], totals)


def test_categories_are_sorted_refused_ones_left_out_and_missing_ones_named() -> None:
    generations = [generation(stats(2, 1)), None, generation(stats(3, 3), 7), generation(stats(1, 0))]
    found = by_category(generations, ["b", "b", "a", None])
    assert list(found) == [UNCATEGORISED, "a", "b"]
    assert found["a"] == CategoryResult(num_responses=1, num_output_tokens=7, speculation=stats(3, 3))
    assert found["b"].num_responses == 1


def test_no_categories_without_a_column_or_without_drafts_by_response() -> None:
    assert by_category([generation(stats(2, 1))], [None]) == {}
    assert by_category([generation(None)], ["a"]) == {}
