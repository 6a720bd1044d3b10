import json
from functools import partial

from peagle.drafter.prompts import part_by_hash

parted = partial(part_by_hash, text=lambda row: row["id"])


def test_a_share_depends_on_the_ids_alone() -> None:
    rows = [{"id": str(number)} for number in range(400)]
    greedy, sampled = parted(rows, 0.25)
    assert 70 < len(sampled) < 130
    assert sorted(json.dumps(row) for row in greedy + sampled) == sorted(json.dumps(row) for row in rows)
    assert parted(rows[:100], 0.25)[1] == sampled[: len(parted(rows[:100], 0.25)[1])]
    assert parted(rows, 0.0) == (rows, [])
    assert parted(rows, 1.0) == ([], rows)
