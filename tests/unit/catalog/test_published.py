"""Published tables: what makes one, and that the shipped ones agree with their cards and sources."""

from typing import Any

import pytest
from pydantic import ValidationError

from peagle.catalog.cards import Deployment, ModelCard, PublishedTable, load_catalog

QWEN = "qwen3-coder-30b-a3b-instruct"
# As the post states them: best P-EAGLE over best EAGLE-3, and over no speculation.
PUBLISHED_GAINS = {
    "HumanEval": ([1.22, 1.15, 1.12], [3.97, 4.17, 3.94]),
    "SPEED-Bench, Code": ([1.41, 1.33, 1.24, 1.07, 1.02], [2.97, 3.12, 2.95, 2.59, 2.13]),
}


def row(method: str, k: int, *speeds: float) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": k, "output_tokens_per_s": list(speeds)}


def table(**changes: Any) -> PublishedTable:
    values = {
        "dataset": "HumanEval", "accelerator": "B200", "num_accelerators": 1, "precision": "fp8", "concurrency": [1, 8],
        "speeds": [row("none", 0, 10, 80), row("peagle", 3, 20, 150), row("peagle", 7, 30, 140)],
        "source": "a post", "url": "https://example.org/post",
    }  # fmt: skip
    return PublishedTable.model_validate(values | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": [8, 1]}, "concurrency must ascend"),
        ({"concurrency": [0, 1]}, "concurrency must ascend from 1"),
        ({"concurrency": [1, 8, 32]}, "a value per concurrency"),
        ({"speeds": [row("none", 0, 1, 2), row("none", 0, 3, 4)]}, "each method and K once"),
        ({"speeds": [row("none", 3, 1, 2)]}, "0 exactly with method none"),
        ({"speeds": [row("peagle", 0, 1, 2)]}, "0 exactly with method none"),
        ({"speeds": [row("peagle", 3, 1, 0)]}, "must be positive"),
        ({"speeds": []}, "at least 1 item"),
        ({"source": None}, "source"),
        ({"hardware": "B200"}, "Extra inputs"),
    ],
)
def test_what_is_no_table_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        table(**changes)


def test_the_label_says_on_how_many() -> None:
    assert table().label == "published, one B200"
    assert table(num_accelerators=2, accelerator="H100").label == "published, 2 H100"


def test_the_best_k_follows_the_concurrency() -> None:
    assert [one.num_speculative_tokens for one in table().best("peagle")] == [7, 3]
    assert table().best("eagle3") == []


def test_gains_are_of_the_best_over_the_best() -> None:
    assert table().gains("peagle", over="none") == [3, 150 / 80]
    assert table().gains("peagle", over="eagle3") == []


def published() -> list[tuple[ModelCard, PublishedTable]]:
    return [(card, table) for card in load_catalog() for table in card.published]


@pytest.mark.parametrize(("card", "table"), published(), ids=lambda one: getattr(one, "dataset", ""))
def test_k_on_the_card_is_the_published_table_s_best(card: ModelCard, table: PublishedTable) -> None:
    for concurrency, best in zip(table.concurrency, table.best("peagle"), strict=True):
        advice = card.speculation_for(concurrency, "cuda")
        assert advice is not None
        assert (advice.method, advice.num_speculative_tokens) == ("peagle", best.num_speculative_tokens)
        assert table.label in advice.source


def test_gains_are_those_that_the_post_states() -> None:
    tables = load_catalog().get(QWEN).published
    assert {table.dataset for table in tables} == set(PUBLISHED_GAINS)
    for table in tables:
        over_eagle3, over_none = PUBLISHED_GAINS[table.dataset]
        assert table.gains("peagle", over="eagle3") == pytest.approx(over_eagle3, abs=0.0051)
        assert table.gains("peagle", over="none") == pytest.approx(over_none, abs=0.0051)


def test_jumpstart_deploys_the_head_with_k_of_3() -> None:
    (one,) = load_catalog().get(QWEN).heads["peagle"].deployments
    assert (one.num_speculative_tokens, one.instance_type) == (3, "ml.g7e.2xlarge")
    assert "https://aws.amazon.com/blogs/" in one.source
    with pytest.raises(ValidationError, match="source"):
        Deployment.model_validate(one.model_dump(exclude={"source"}))
