import pytest

from peagle.corpus.rows import RawRow, WorkEstimate

WORKLOAD = WorkEstimate(max_tokens=256)


@pytest.mark.parametrize(
    ("columns", "work"),
    [
        ({"prompt": "a"}, 256),
        ({"sampling": {"max_tokens": 7}}, 7),
        ({"sampling": '{"max_tokens": 7, "n": 3}'}, 21),
        ({"body": {"max_tokens": 5}}, 5),
        ({"body": {"max_completion_tokens": 6, "max_tokens": 5}}, 6),
        ({"sampling": {"max_tokens": "many"}}, 256),
        ({"sampling": {"max_tokens": -5}}, 256),
        ({"sampling": {"max_tokens": 1e300}}, 256),
        ({"sampling": {"max_tokens": 5, "n": [1]}}, 256),
        ({"sampling": "{not json"}, 256),
        ({"sampling": [1]}, 256),
    ],
)
def test_work_follows_max_tokens(columns, work):
    assert WORKLOAD.of_row(RawRow(columns), 0) == work


def test_work_of_a_prompt():
    assert WORKLOAD.of_row(RawRow({"prompt": "a"}), 4000) == 256 + 100
    assert WORKLOAD.of_rows(3, 4000.0) == 3 * 256 + 100


def test_invalid_row_is_no_work():
    assert WORKLOAD.of_row(RawRow(error="not JSON"), 10**6) == 0


def test_work_reads_sampling_column():
    assert WorkEstimate(max_tokens=256, column="mine").of_row(RawRow({"mine": {"max_tokens": 2}}), 0) == 2
