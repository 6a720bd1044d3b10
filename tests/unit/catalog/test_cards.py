from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from peagle.catalog.cards import Deployment, ModelCard, PublishedTable, StepTable, load_card, load_catalog
from peagle.errors import CatalogError


def speculation_row(platform, max_concurrency, method="peagle", k=3):
    return {
        "platform": platform,
        "max_concurrency": max_concurrency,
        "method": method,
        "num_speculative_tokens": k,
        "source": "measured",
    }


def make_card(*rows, **changes):
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


CARD = make_card(
    speculation_row("cpu", 3, k=5),
    speculation_row("cpu", None, "none", 0),
    speculation_row("cuda", 8, k=7),
    speculation_row("cuda", 64, k=3),
)


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
def test_recommended_k_by_concurrency_and_platform(concurrency, platform, expected):
    speculation = CARD.speculation_for(concurrency, platform)
    assert speculation is not None
    assert (speculation.method, speculation.num_speculative_tokens) == expected


@pytest.mark.parametrize(
    "rows",
    [
        [speculation_row("cpu", 8), speculation_row("cpu", 4)],
        [speculation_row("cpu", 4), speculation_row("cpu", 4)],
        [speculation_row("cpu", None), speculation_row("cpu", 4)],
    ],
    ids=["descending", "twice", "unlimited-row-first"],
)
def test_rows_of_a_platform_must_ascend_by_concurrency(rows):
    with pytest.raises(ValidationError, match="must ascend"):
        make_card(*rows)


SHIPPED = ["gemma-4-31b-it", "gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b-a3b-instruct", "smollm2-135m"]


def test_shipped_cards_load():
    assert load_catalog().names() == SHIPPED
    assert [card.name for card in load_catalog()] == SHIPPED


def test_unknown_model_gets_a_suggestion():
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


def test_users_can_add_and_replace_cards(peagle_home):
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
def test_invalid_cards_are_refused_with_the_key(tmp_path, changes, key, hint):
    path = write_card(tmp_path, "mine", **changes)
    with pytest.raises(CatalogError) as caught:
        load_card(path)
    assert str(path) in caught.value.message
    assert key in caught.value.message
    assert hint in caught.value.hint


def test_card_in_a_file_of_another_name_is_refused(tmp_path):
    path = write_card(tmp_path, "mine").rename(tmp_path / "yours.yaml")
    with pytest.raises(CatalogError, match="the file name differs from the card's name, mine") as caught:
        load_card(path)
    assert "mine.yaml" in caught.value.hint


QWEN = "qwen3-coder-30b-a3b-instruct"
# From AWS's blog post: speedups of the best P-EAGLE over the best EAGLE-3, and over no speculation, by concurrency.
PUBLISHED_GAINS = {
    "HumanEval": ([1.22, 1.15, 1.12], [3.97, 4.17, 3.94]),
    "SPEED-Bench, Code": ([1.41, 1.33, 1.24, 1.07, 1.02], [2.97, 3.12, 2.95, 2.59, 2.13]),
}


def speeds_row(method, k, *speeds):
    return {"method": method, "num_speculative_tokens": k, "output_tokens_per_s": list(speeds)}


def make_table(**changes):
    values = {
        "dataset": "HumanEval", "accelerator": "B200", "num_accelerators": 1, "precision": "fp8", "concurrency": [1, 8],
        "speeds": [speeds_row("none", 0, 10, 80), speeds_row("peagle", 3, 20, 150), speeds_row("peagle", 7, 30, 140)],
        "source": "a blog post", "url": "https://example.org/post",
    }  # fmt: skip
    return PublishedTable.model_validate(values | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": [8, 1]}, "concurrency must ascend"),
        ({"concurrency": [1, 8, 32]}, "a value per concurrency"),
        ({"speeds": [speeds_row("none", 0, 1, 2), speeds_row("none", 0, 3, 4)]}, "each method and K once"),
        ({"speeds": [speeds_row("none", 3, 1, 2)]}, "must be 0 with method none, and above 0"),
        ({"speeds": [speeds_row("peagle", 3, 1, 0)]}, "must be positive"),
        ({"speeds": []}, "at least 1 item"),
        ({"hardware": "B200"}, "Extra inputs"),
    ],
)
def test_invalid_tables_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        make_table(**changes)


def published_tables():
    return [(card, table) for card in load_catalog() for table in card.published]


@pytest.mark.parametrize(("card", "table"), published_tables(), ids=lambda value: getattr(value, "dataset", ""))
def test_recommended_k_is_the_fastest_in_the_published_table(card, table):
    for concurrency, best in zip(table.concurrency, table.best("peagle"), strict=True):
        recommended = card.speculation_for(concurrency, "cuda")
        assert recommended is not None
        assert (recommended.method, recommended.num_speculative_tokens) == ("peagle", best.num_speculative_tokens)
        assert table.label in recommended.source


def test_gains_equal_the_published_gains():
    tables = load_catalog().get(QWEN).published
    assert {table.dataset for table in tables} == set(PUBLISHED_GAINS)
    for table in tables:
        gains_over_eagle3, gains_over_none = PUBLISHED_GAINS[table.dataset]  # with two decimals
        assert table.gains("peagle", over="eagle3") == pytest.approx(gains_over_eagle3, abs=0.0051)
        assert table.gains("peagle", over="none") == pytest.approx(gains_over_none, abs=0.0051)


def test_card_has_the_sagemaker_jumpstart_deployment_of_the_head():
    (deployment,) = load_catalog().get(QWEN).heads["peagle"].deployments
    assert (deployment.num_speculative_tokens, deployment.instance_type) == (3, "ml.g7e.2xlarge")
    assert "https://aws.amazon.com/blogs/" in deployment.source
    with pytest.raises(ValidationError, match="source"):
        Deployment.model_validate(deployment.model_dump(exclude={"source"}))


STEP_TABLE: dict[str, Any] = {
    "platform": "cpu", "precision": "bf16", "source": "measured", "concurrency": [1, 8],
    "rows": [
        {"method": "none", "num_speculative_tokens": 0, "step_ms": [20.0, 40.0]},
        {"method": "peagle", "num_speculative_tokens": 3, "step_ms": [30.0, 80.0]},
        {"method": "peagle", "num_speculative_tokens": 7, "step_ms": [40.0, 160.0]},
    ],
}  # fmt: skip


def test_break_even_is_a_ratio_of_step_times_interpolated_between_k():
    table = StepTable(**STEP_TABLE)
    assert table.break_even("peagle", 3) == {1: 1.5, 8: 2.0}
    assert table.break_even("peagle", 5) == pytest.approx({1: 1.75, 8: 3.0})
    assert [table.break_even(*unknown) for unknown in (("peagle", 1), ("peagle", 8), ("eagle3", 3))] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"method": "none", "num_speculative_tokens": 0, "step_ms": [20.0]}], "a time per concurrency"),
        ([{"method": "none", "num_speculative_tokens": 0, "step_ms": [20.0, 0.0]}], "above zero"),
        (STEP_TABLE["rows"][1:], "one row must have method none"),
        ([*STEP_TABLE["rows"], STEP_TABLE["rows"][2]], "no two rows the same method and K"),
        ([STEP_TABLE["rows"][0] | {"spread": [0.1]}], "a value per concurrency"),
    ],
)
def test_invalid_step_tables_are_refused(rows, message):
    with pytest.raises(ValidationError, match=message):
        StepTable(**{**STEP_TABLE, "rows": rows})


def test_shipped_card_has_break_evens():
    card = load_catalog().get("smollm2-135m")
    (table,) = card.steps
    for row in card.speculation:
        break_evens = table.break_even(row.method, row.num_speculative_tokens)
        assert set(break_evens) == set(table.concurrency)
        assert all(1 < length < row.num_speculative_tokens + 1 for length in break_evens.values())
