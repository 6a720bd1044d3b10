import json
import logging
from dataclasses import asdict

import pytest

from peagle.economics import request_work
from peagle.economics.ledger import append_request
from peagle.economics.request_work import read_request_totals
from peagle.economics.spending import SpendingGroup
from peagle.economics.usage import Work
from peagle.speculation import SpeculationStats
from tests.unit.pipelines.online.ledgers import a_request


def write(folder, lines=()):
    for number in range(40):
        accepted = (6, 3) if number % 4 else (6, 2, 1)
        drafts = SpeculationStats(
            num_drafts=10, num_draft_tokens=30, accepted_per_position=accepted, num_lookup_tokens=number % 2
        )
        request = a_request(
            str(number), key=f"k{number % 3}", usd=0.01 * number, started_at=1.0, finished_at=86_000.0 + 100 * number,
            tags='{"team": "a"}' if number % 2 else "{}", session_id=f"s{number % 2}", speculation=drafts,
        )  # fmt: skip
        append_request(folder, request)
    for line in lines:
        with (folder / "requests-s0.jsonl").open("ab") as file:
            file.write(line)


def read_by_line(folder, monkeypatch):
    with monkeypatch.context() as patch:  # parsing by column fails
        patch.setattr(request_work, "_parse_columns", lambda piece: (_ for _ in ()).throw(ValueError))
        return read_request_totals(folder)


def edited(**changes):
    record = json.loads(a_request("x").to_json())
    usage = {name: changes.pop(name) for name in list(changes) if name in record["usage"] and name != "version"}
    return json.dumps({**record, **changes, "usage": {**record["usage"], **usage}}).encode() + b"\n"


def test_parsing_by_column_equals_parsing_by_line(tmp_path, monkeypatch, caplog):
    write(tmp_path)
    parsed_lines = []
    monkeypatch.setattr(request_work, "_work_of", lambda request: parsed_lines.append(request))
    work_by_group = read_request_totals(tmp_path)
    assert parsed_lines == []
    monkeypatch.undo()
    expected = read_by_line(tmp_path, monkeypatch)
    assert work_by_group.keys() == expected.keys()
    for group, work in work_by_group.items():
        assert asdict(work) == pytest.approx(asdict(expected[group]))
    assert work_by_group[SpendingGroup(0, "s0", "k0", "m", None, "{}")] == Work(
        num_requests=1, num_prompt_tokens=100, num_output_tokens=41, num_drafts=10, num_accepted_tokens=9, busy_s=2.2,
        request_s=85_999.0, usd=0.0,
    )  # fmt: skip
    assert caplog.records == []


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n", edited(usd=-1.0), edited(usd=float("nan")), edited(version=2),
        edited(colour="red"), edited(num_rows=-1), edited(started_at=9e9), edited(num_cached_tokens=101),
        edited(key=None), edited(tags="[]"), edited(tags=5), edited(tags=""), edited(num_rows="1"),
    ],
)  # fmt: skip
def test_invalid_lines_are_skipped_and_logged(tmp_path, monkeypatch, caplog, line):
    write(tmp_path, [line])
    with caplog.at_level(logging.ERROR):
        work_by_group = read_request_totals(tmp_path)
    assert sum(work.num_requests for work in work_by_group.values()) == 40
    assert "skipped an invalid line" in caplog.text


def test_a_torn_last_line_is_not_read(tmp_path, caplog):
    write(tmp_path, [a_request("torn").to_json()[:50]])
    assert sum(work.num_requests for work in read_request_totals(tmp_path).values()) == 40
    assert caplog.records == []


def test_records_from_before_tags_and_accounts_are_read(tmp_path, caplog):
    record = json.loads(a_request("old").to_json())
    for name in ("tags", "account", "num_choices"):
        del record[name]
    (tmp_path / "requests-s.jsonl").write_text(json.dumps(record) + "\n")
    (group,) = read_request_totals(tmp_path)
    assert (group.tags, caplog.records) == ("{}", [])


def test_a_reader_reads_each_whole_line_once(tmp_path):
    reader = request_work.RequestTotalsReader(tmp_path)
    write(tmp_path)
    assert sum(work.num_requests for _, work in reader.new()) == 40
    line = a_request("late", session_id="s1").to_json() + b"\n"
    with (tmp_path / "requests-s1.jsonl").open("ab") as file:
        file.write(line[:50])
        file.flush()
        assert list(reader.new()) == []
        file.write(line[50:])
    assert [work.num_requests for _, work in reader.new()] == [1]
    assert list(reader.new()) == []
