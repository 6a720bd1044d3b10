from pathlib import Path

import pytest
import yaml

from peagle.catalog.loader import load_card, load_catalog
from peagle.errors import CatalogError

SHIPPED = ["gemma-4-31b-it", "gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b-a3b-instruct", "smollm2-135m"]


def test_the_shipped_cards_load() -> None:
    assert load_catalog().names() == SHIPPED
    assert [card.name for card in load_catalog()] == SHIPPED


def test_a_model_is_found_by_its_hub_id_too() -> None:
    assert load_catalog().get("Qwen/qwen3-coder-30b-a3b-instruct").name == "qwen3-coder-30b-a3b-instruct"


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(CatalogError, match="gpt-os-20b") as caught:
        load_catalog().get("gpt-os-20b")
    assert "did you mean gpt-oss-20b" in caught.value.hint
    assert load_catalog().find("gpt-os-20b") is None


def write_card(folder: Path, name: str, **changes: object) -> Path:
    values = load_catalog().get("smollm2-135m").model_dump() | {"name": name} | changes
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_user_adds_cards_and_replaces_ours(peagle_home: Path) -> None:
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
def test_a_faulty_card_is_refused_by_key(tmp_path: Path, changes: dict[str, object], key: str, hint: str) -> None:
    path = write_card(tmp_path, "mine", **changes)
    with pytest.raises(CatalogError) as caught:
        load_card(path)
    assert str(path) in caught.value.message
    assert key in caught.value.message
    assert hint in caught.value.hint


def test_a_card_is_named_as_its_file(tmp_path: Path) -> None:
    path = write_card(tmp_path, "mine").rename(tmp_path / "yours.yaml")
    with pytest.raises(CatalogError, match="name: mine") as caught:
        load_card(path)
    assert "mine.yaml" in caught.value.hint


@pytest.mark.parametrize("content", ["{", "- 1\n- 2\n", ""])
def test_what_is_no_card_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(CatalogError, match=r"mine\.yaml"):
        load_card(path)
