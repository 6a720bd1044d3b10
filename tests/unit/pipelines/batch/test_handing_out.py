import itertools

from peagle.corpus.rows import Span
from pipelines.batch.handing_out import chunks, longest_first
from pipelines.batch.plan import WorkUnit


def unit(number, work):
    return WorkUnit(
        unit=number, first_id=number, span=Span(path="a", format="csv", first_row=number, num_rows=1, work=work)
    )


def test_long_units_come_first_and_similar_ones_in_the_order_of_the_corpus():
    units = [unit(0, 10), unit(1, 1000), unit(2, 9), unit(3, 1001), unit(4, 600), unit(5, 0)]
    assert [one.unit for one in longest_first(units)] == [1, 3, 4, 0, 2, 5]


def test_units_of_a_plan_that_does_not_know_their_work_stay_in_its_order():
    units = [unit(number, 0) for number in range(5)]
    assert longest_first(units) == units


def test_pieces_hold_every_unit_once_in_order_and_the_last_ones_hold_one():
    units = [unit(number, 0) for number in range(20_000)]
    pieces = chunks(units)
    assert list(itertools.chain(*pieces)) == units
    assert all(len(piece) == 1 for piece in pieces[-512:])
    assert len(pieces) < 3_000
    assert max(map(len, pieces)) <= 256
    assert chunks(units[:3]) == [units[:1], units[1:2], units[2:3]]
