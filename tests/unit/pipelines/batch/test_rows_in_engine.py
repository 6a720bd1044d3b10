import pytest

from pipelines.batch.locks import rows_in_engine


@pytest.mark.parametrize(("slots", "rows"), [(1, 2), (8, 16), (64, 96), (256, 288), (512, 576)])
def test_rows_in_engine(slots: int, rows: int) -> None:
    assert rows_in_engine(slots) == rows
