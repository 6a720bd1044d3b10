from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from peagle.catalog.cards import HeadCard, ModelCard, SpeculationRow, load_card, load_catalog
from peagle.errors import CatalogError


def row(platform, limit, method="peagle", k=3):
    return {
        "platform": platform,
        "max_concurrency": limit,
        "method": method,
        "num_speculative_tokens": k,
        "source": "measured",
    }


def card(*rows, **changes):
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


def test_a_model_cannot_be_called_like_a_command():
    with pytest.raises(ValidationError, match="the name 'add' is reserved"):
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
def test_k_follows_concurrency_and_hardware(concurrency, platform, expected):
    found = CARD.speculation_for(concurrency, platform)
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == expected


def test_beyond_what_was_measured_there_is_no_row():
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
def test_rows_ascend(rows):
    with pytest.raises(ValidationError, match="must ascend"):
        card(*rows)


def test_a_row_needs_its_head():
    with pytest.raises(ValidationError, match="no head 'eagle3'"):
        card(row("cpu", 4, "eagle3"))


@pytest.mark.parametrize(("method", "k"), [("none", 3), ("peagle", 0)])
def test_none_and_zero_go_together(method, k):
    with pytest.raises(ValidationError, match="exactly with method none"):
        SpeculationRow.model_validate(row("cpu", 4, method, k))


def test_a_published_head_has_an_id():
    with pytest.raises(ValidationError, match="needs an id"):
        HeadCard(kind="huggingface", source="card")
    assert HeadCard(kind="huggingface", published=False, source="card").id is None


@pytest.mark.parametrize("group", ["licence", "architecture", "precision", "smallest_hardware"])
def test_every_group_of_facts_names_its_source(group):
    without_source = getattr(CARD, group).model_dump(exclude={"source"})
    with pytest.raises(ValidationError, match="source"):
        card(**{group: without_source})


SHIPPED = ["gemma-4-31b-it", "gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b-a3b-instruct", "smollm2-135m"]


def test_the_shipped_cards_load():
    assert load_catalog().names() == SHIPPED
    assert [card.name for card in load_catalog()] == SHIPPED


def test_a_model_is_found_by_its_hub_id_too():
    assert load_catalog().get("Qwen/qwen3-coder-30b-a3b-instruct").name == "qwen3-coder-30b-a3b-instruct"


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(CatalogError, match="gpt-os-20b") as caught:
        load_catalog().get("gpt-os-20b")
    assert "did you mean gpt-oss-20b" in caught.value.hint
    assert load_catalog().find("gpt-os-20b") is None


def write_card(folder, name, **changes):
    values = load_catalog().get("smollm2-135m").model_dump() | {"name": name} | changes
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_user_adds_cards_and_replaces_ours(peagle_home):
    write_card(peagle_home / "models", "mine", title="Mine")
    write_card(peagle_home / "models", "smollm2-135m", title="Tuned")
    catalog = load_catalog()
    assert catalog.get("mine").title == "Mine"
    assert catalog.get("smollm2-135m").title == "Tuned"
    assert len(catalog.names()) == len(SHIPPED) + 1


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"licnce": "MIT"}, "licnce: unknown key", "did you mean licence"),
        ({"licence": {"name": "MIT", "sourc": "x"}}, "licence.source: Field required (and 1 more)", "source"),
        (
            {"heads": {"peagle": {"kind": "shipped", "id": "h", "source": "s", "publishd": True}}},
            "heads.peagle.publishd: unknown key",
            "did you mean published",
        ),
        (
            {"speculation": [{"platform": "cpu", "max_concurency": 1}]},
            "speculation.0.method: Field required",
            "did you mean max_concurrency",
        ),
        ({"title": None}, "title: Input should be a valid string", ""),
    ],
)
def test_a_faulty_card_is_refused_by_key(tmp_path, changes, key, hint):
    path = write_card(tmp_path, "mine", **changes)
    with pytest.raises(CatalogError) as caught:
        load_card(path)
    assert str(path) in caught.value.message
    assert key in caught.value.message
    assert hint in caught.value.hint


def test_a_card_is_named_as_its_file(tmp_path):
    path = write_card(tmp_path, "mine").rename(tmp_path / "yours.yaml")
    with pytest.raises(CatalogError, match="name: mine") as caught:
        load_card(path)
    assert "mine.yaml" in caught.value.hint


@pytest.mark.parametrize("content", ["{", "- 1\n- 2\n", ""])
def test_what_is_no_card_is_refused(tmp_path, content):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(CatalogError, match=r"mine\.yaml"):
        load_card(path)
