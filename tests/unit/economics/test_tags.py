import pytest

from peagle.economics.tags import MAX_TAGS, TagOptions, parse_tags, tags_from_text, tags_to_text


def test_tags_round_trip():
    assert tags_to_text({"b": "1", "a": "2"}) == tags_to_text({"a": "2", "b": "1"})
    assert tags_from_text(tags_to_text({"team": "search"})) == {"team": "search"}
    assert tags_from_text(tags_to_text({})) == {}


@pytest.mark.parametrize(
    "value", [["team=search", "project=x"], "team=search, project=x", {"team": "search", "project": "x"}]
)
def test_tags_are_read_from_flags_environment_and_yaml(value):
    assert TagOptions(tags=value).tags == {"team": "search", "project": "x"}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["team"], "not KEY=VALUE"),
        (["team=a", "team=b"], "given twice"),
        (["1=a"], "use a letter"),
        (["team="], "1 to 128"),
        (["team=a\nb"], "1 to 128"),
        (["team=" + "x" * 129], "1 to 128"),
        ([f"t{number}=1" for number in range(MAX_TAGS + 1)], "are allowed"),
    ],
)
def test_invalid_tags_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        parse_tags(pairs)


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "{", 5, None])
def test_invalid_tags_as_text_are_refused(text):
    with pytest.raises(ValueError, match=r"invalid tags|Expecting"):
        tags_from_text(text)
