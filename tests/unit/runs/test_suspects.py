import pytest

from peagle.runs.suspects import Note, RowsInEngine, UnitNotes, Verdict, judge, stale_notes

LOST_NOTE = Note()  # the note of a process that ended without naming the rows in its engine


@pytest.fixture
def folder(root):
    root.mkdir()
    return root


def crash_note(*rows, alone=False):
    return Note(rows=rows, alone=alone, died=True)


def lost_alone_note(row):
    """The note of a process that ended without a crash report while only this row was in its engine."""
    return Note(rows=(row,), alone=True)


def verdict(suspects=(), poisoned=()):
    return Verdict(suspects=frozenset(suspects), poisoned=frozenset(poisoned))


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([], verdict()),
        ([crash_note(0, 2)], verdict(suspects=[0, 2])),
        ([crash_note(0, 2), crash_note(0, alone=True)], verdict(suspects=[0, 2])),
        ([crash_note(0, 2), crash_note(0, alone=True), crash_note(0, alone=True)], verdict(suspects=[2], poisoned=[0])),
        ([crash_note(0, 2), crash_note(0, alone=True), crash_note(2, alone=True)], verdict(suspects=[0, 2])),
        ([crash_note(0, 2), crash_note(0, alone=True), lost_alone_note(0)], verdict(suspects=[2], poisoned=[0])),
        ([crash_note(0, 2), crash_note(1)], verdict(suspects=[0, 1, 2])),
        ([LOST_NOTE], verdict()),
        ([LOST_NOTE, LOST_NOTE], verdict(suspects=range(4))),
        ([LOST_NOTE, LOST_NOTE, lost_alone_note(3)], verdict(suspects=range(4))),
        ([LOST_NOTE, LOST_NOTE, lost_alone_note(3), lost_alone_note(3)], verdict(suspects=range(3), poisoned=[3])),
        ([crash_note(1), lost_alone_note(1)], verdict(suspects=[1])),
        ([lost_alone_note(1), lost_alone_note(2)], verdict(suspects=[1, 2])),
    ],
)
def test_judge_finds_suspects_and_poisoned_rows(notes, expected):
    assert judge(notes, 4) == expected


def test_notes_are_read_by_the_next_process(folder):
    first = UnitNotes(folder, 7, "a")
    first.write(Note())
    first.write(crash_note(1))
    second = UnitNotes(folder, 7, "b")
    second.write(Note())
    assert second.verdict(2) == verdict(suspects=[1])
    assert UnitNotes(folder, 8, "b").verdict(2) == verdict()
    second.discard()
    assert [path.name for path in folder.iterdir()] == ["unit-00000007.a.json"]
    second.clear()
    assert not list(folder.iterdir())


def test_rows_of_waiting_units_are_not_suspects(folder):
    for session in ("a", "b"):
        UnitNotes(folder, 1, session).write(lost_alone_note(0))
        UnitNotes(folder, 2, session).write(LOST_NOTE)
    assert UnitNotes(folder, 2, "c").verdict(3) == verdict()
    assert UnitNotes(folder, 1, "c").verdict(3) == verdict(poisoned=[0])


def test_stale_notes_name_no_rows_or_belong_to_committed_units(folder):
    UnitNotes(folder, 1, "a").write(LOST_NOTE)
    UnitNotes(folder, 2, "a").write(crash_note(0))
    UnitNotes(folder, 3, "a").write(lost_alone_note(0))
    UnitNotes(folder, 4, "a").write(crash_note(0))
    stale = stale_notes(folder, committed={4})
    assert sorted(path.name for path in stale) == ["unit-00000001.a.json", "unit-00000004.a.json"]


def test_crash_notes_name_the_rows_in_the_engine(folder):
    rows = RowsInEngine()
    for unit in (1, 2, 3):
        rows.start(unit, UnitNotes(folder, unit, "a")).write(Note())
    rows.end(3)  # the unit is committed: the caller clears its notes
    assert not rows.has_rows()
    with rows.inside(1, 5), rows.inside(1, 0), rows.inside(3, 0):
        with rows.inside(1, 7), rows.inside(2, 0):
            assert rows.has_rows()
        rows.mark_suspected(alone=False)
    assert not rows.has_rows()
    assert UnitNotes(folder, 1, "b").verdict(8) == verdict(suspects=[0, 5])
    assert sorted(path.name for path in folder.iterdir()) == ["unit-00000001.a.json", "unit-00000003.a.json"]
