import pytest

from pipelines.batch.locks import rows_in_engine


@pytest.mark.parametrize(("num_slots", "num_rows"), [(1, 2), (8, 16), (64, 96), (256, 288), (512, 576)])
def test_engine_has_more_rows_than_slots(num_slots: int, num_rows: int) -> None:
    assert rows_in_engine(num_slots) == num_rows
