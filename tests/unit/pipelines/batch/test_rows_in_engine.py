import pytest

from pipelines.batch.locks import rows_in_engine


@pytest.mark.parametrize(("slots", "rows"), [(1, 2), (8, 16), (64, 96), (256, 288), (512, 576)])
def test_as_many_wait_as_may_end_in_one_step_but_not_all_that_a_large_engine_holds(slots: int, rows: int) -> None:
    assert rows_in_engine(slots) == rows
