from dataclasses import replace
from datetime import date

import pytest

from peagle.economics.spending import DAY_S, NAME, Days, day_number, node_charges
from tests.unit.economics.month import SERVING

MIDNIGHT = day_number(date(2026, 11, 4)) * DAY_S


def session(begin_h, end_h):
    """Hours from a midnight on."""
    return replace(
        SERVING, started_at=MIDNIGHT + 3600.0 * begin_h, last_seen_at=MIDNIGHT + 3600.0 * end_h, load_s=0.0, busy_s=0.0,
        idle_s=3600.0 * (end_h - begin_h),
    )  # fmt: skip


def test_nodes_are_paid_while_an_engine_lives_and_once_where_several_do():
    together = [session(1, 5), session(-2, 2), session(3, 4), session(8, 9)]
    charges = list(node_charges(together, Days(), 0.5))
    assert sum(charge.spend.idle_usd for charge in charges) == pytest.approx(0.5 * (7 + 1))
    assert {(charge.run, charge.key) for charge in charges} == {(NAME, "")}


def test_each_day_pays_its_own_hours():
    fourth = MIDNIGHT // DAY_S
    for day, hours in ((fourth - 1, 2), (fourth, 24), (fourth + 1, 3)):
        charges = list(node_charges([session(-2, 27)], Days(day, day), 0.5))
        assert [(charge.day, charge.spend.idle_usd) for charge in charges] == [(day, pytest.approx(0.5 * hours))]


def test_without_an_engine_nothing_is_paid():
    assert list(node_charges([], Days(), 0.5)) == []
    assert list(node_charges([session(1, 1)], Days(), 0.5)) == []
