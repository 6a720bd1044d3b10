from typing import Any

import pytest
from pydantic import ValidationError

from peagle.catalog.cards import HeadCard, ModelCard, SpeculationRow


def row(platform: str, limit: int | None, method: str = "peagle", k: int = 3) -> dict[str, Any]:
    return {
        "platform": platform,
        "max_concurrency": limit,
        "method": method,
        "num_speculative_tokens": k,
        "source": "measured",
    }


def card(*rows: dict[str, Any], **changes: Any) -> ModelCard:
    values: dict[str, Any] = {
        "name": "m",
        "title": "M",
        "summary": "a model",
        "source": {"kind": "huggingface", "id": "org/m"},
        "licence": {"name": "MIT", "source": "card"},
        "architecture": {
            "family": "llama",
            "hidden_size": 8,
            "num_layers": 2,
            "vocab_size": 16,
            "num_parameters": None,
            "context_tokens": 64,
            "source": "config.json",
        },
        "precision": {"options": ["bf16"], "source": "card"},
        "smallest_hardware": {"description": "anything", "source": "computed"},
        "heads": {"peagle": {"kind": "huggingface", "id": "org/head", "source": "card"}},
        "speculation": list(rows),
    }
    return ModelCard.model_validate(values | changes)


def test_a_model_cannot_be_called_like_a_command() -> None:
    with pytest.raises(ValidationError, match="cannot be called 'add'"):
        card(name="add")


CARD = card(row("cpu", 3, k=5), row("cpu", None, "none", 0), row("cuda", 8, k=7), row("cuda", 64, k=3))


@pytest.mark.parametrize(
    ("concurrency", "platform", "expected"),
    [
        (1, "cpu", ("peagle", 5)),
        (3, "cpu", ("peagle", 5)),
        (4, "cpu", ("none", 0)),
        (1000, "cpu", ("none", 0)),
        (8, "cuda", ("peagle", 7)),
        (9, "cuda", ("peagle", 3)),
        (2, None, ("peagle", 5)),
    ],
)
def test_k_follows_concurrency_and_hardware(concurrency: int, platform: Any, expected: tuple[str, int]) -> None:
    found = CARD.speculation_for(concurrency, platform)
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == expected


def test_beyond_what_was_measured_there_is_no_row() -> None:
    assert CARD.speculation_for(65, "cuda") is None
    assert card().speculation_for(1) is None


@pytest.mark.parametrize(
    "rows",
    [
        [row("cpu", 8), row("cpu", 4)],
        [row("cpu", 4), row("cpu", 4)],
        [row("cpu", None), row("cpu", 4)],
    ],
    ids=["descending", "twice", "open-row-first"],
)
def test_rows_ascend(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError, match="must ascend"):
        card(*rows)


def test_a_row_needs_its_head() -> None:
    with pytest.raises(ValidationError, match="no head 'eagle3'"):
        card(row("cpu", 4, "eagle3"))


@pytest.mark.parametrize(("method", "k"), [("none", 3), ("peagle", 0)])
def test_none_and_zero_go_together(method: str, k: int) -> None:
    with pytest.raises(ValidationError, match="exactly with method none"):
        SpeculationRow.model_validate(row("cpu", 4, method, k))


def test_a_published_head_has_an_id() -> None:
    with pytest.raises(ValidationError, match="needs an id"):
        HeadCard(kind="huggingface", source="card")
    assert HeadCard(kind="huggingface", published=False, source="card").id is None


@pytest.mark.parametrize("group", ["licence", "architecture", "precision", "smallest_hardware"])
def test_every_group_of_facts_names_its_source(group: str) -> None:
    without_source = getattr(CARD, group).model_dump(exclude={"source"})
    with pytest.raises(ValidationError, match="source"):
        card(**{group: without_source})
