import logging
import os
import threading
from random import Random

import pytest

from peagle.economics.ledger import append_request, write_batch
from peagle.economics.usage import RequestUsage
from peagle.speculation import SpeculationStats
from pipelines.online import totals as totals_module
from pipelines.online.totals import TokenPrice, Totals
from tests.unit.pipelines.online.ledgers import make_request_usage

DRAFTS = SpeculationStats(num_drafts=20, num_draft_tokens=60, accepted_per_position=(15, 10, 5), num_lookup_tokens=7)


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch):
    """Write a checkpoint after every read with a new record."""
    monkeypatch.setattr(totals_module, "_MIN_UNSAVED", 0)
    monkeypatch.setattr(totals_module, "_CELLS_PER_RECORD", 10**9)


def append_requests(folder, *numbers, session="s"):
    for number in numbers:
        usage = {"started_at": 1000.0 + 30 * number, "finished_at": 1002.2 + 30 * number, "speculation": DRAFTS}
        key = ("alice", "bob")[number % 2]
        append_request(folder, make_request_usage(f"r{number}", session_id=session, key=key, usd=number / 7, **usage))


def read_totals(folder):
    totals = Totals(folder)
    totals.catch_up()
    return totals


def cells_and_spend(totals):
    """Return the totals without the prices, which depend on the latest records."""
    return totals.cells, totals.budgets.ledger_usd, totals.budgets.ledger_batches


def read_whole_ledger(folder, monkeypatch):
    """Return the result of `cells_and_spend` for totals that are read without a checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(totals_module, "CHECKPOINT_NAME", "none")
        patch.setattr(totals_module, "_MIN_UNSAVED", 10**9)
        return cells_and_spend(read_totals(folder))


@pytest.fixture
def parsed_lines(monkeypatch):
    """The ledger lines that have been parsed."""
    lines, read = [], RequestUsage.from_json
    monkeypatch.setattr(RequestUsage, "from_json", lambda line: lines.append(line) or read(line))
    return lines


def test_next_process_continues_from_the_checkpoint(tmp_path, monkeypatch, parsed_lines):
    append_requests(tmp_path, *range(20))
    batch = make_request_usage("batch_1", session_id="batch_1", usd=3.0)
    write_batch(tmp_path, batch)
    read_totals(tmp_path)
    append_requests(tmp_path, 20, 21)
    append_requests(tmp_path, 22, session="another")
    parsed_lines.clear()
    result = read_totals(tmp_path)
    assert len(parsed_lines) == 3
    assert result.budgets.ledger_batches == {"batch_1"}
    assert cells_and_spend(result) == read_whole_ledger(tmp_path, monkeypatch)


def damage_checkpoint(change):
    def apply(folder):
        path = folder / "totals.jsonl"
        path.write_bytes(change(path.read_bytes()))

    return apply


def shorten_ledger(folder):
    os.truncate(folder / "requests-s.jsonl", 700)  # bytes; all of it had been read


def shorten_and_grow_ledger(folder):
    """Imitate a power cut that lost lines after they were read."""
    path = folder / "requests-s.jsonl"
    size = path.stat().st_size
    os.truncate(path, size - len(path.read_bytes().splitlines()[-1]) - 1)
    append_requests(folder, *range(30, 40))
    assert path.stat().st_size > size


@pytest.mark.parametrize(
    "change",
    [
        shorten_ledger,
        shorten_and_grow_ledger,
        lambda folder: (folder / "requests-t.jsonl").unlink(),
        lambda folder: (folder / "requests-t.jsonl").rename(folder / "requests-u.jsonl"),
        damage_checkpoint(lambda data: data[:-2]),
        damage_checkpoint(lambda data: data[: len(data) // 2]),
        damage_checkpoint(lambda data: data.replace(b"alice", b"clive", 1)),
        damage_checkpoint(lambda data: data.replace(b'"format": [4', b'"format": [3')),
        damage_checkpoint(lambda data: b""),
        damage_checkpoint(lambda data: b"[]\n" + data),
        damage_checkpoint(lambda data: b"\xff" + data),
    ],
)
def test_invalid_checkpoint_is_ignored(tmp_path, monkeypatch, caplog, change):
    append_requests(tmp_path, *range(20))
    append_requests(tmp_path, *range(20, 25), session="t")
    read_totals(tmp_path)
    change(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert cells_and_spend(read_totals(tmp_path)) == read_whole_ledger(tmp_path, monkeypatch)
    assert "reading the whole ledger" in caplog.text
    caplog.clear()
    read_totals(tmp_path)  # a valid checkpoint has replaced the invalid one
    assert not caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_no_record_is_lost_or_counted_twice_with_concurrent_writers(tmp_path, monkeypatch, seed):
    """Two ingresses read and restart while engines append. Some lines are incomplete."""
    random, number = Random(seed), 0
    ingresses = [read_totals(tmp_path), read_totals(tmp_path)]
    for _ in range(60):
        action = random.random()
        if action < 0.5:
            for _ in range(random.randint(1, 4)):
                append_requests(tmp_path, number, session=random.choice("stu"))
                number += 1
        elif action < 0.6:
            with (tmp_path / f"requests-{random.choice('stu')}.jsonl").open("ab") as file:
                file.write(b'{"torn": ' + (b"\n" if random.random() < 0.5 else b""))
        elif action < 0.85:
            random.choice(ingresses).catch_up()
        else:
            ingresses[random.randrange(2)] = read_totals(tmp_path)
    for ingress in ingresses:
        ingress.catch_up()
    expected = read_whole_ledger(tmp_path, monkeypatch)
    for result in (*ingresses, read_totals(tmp_path)):
        cells, spent, _ = cells_and_spend(result)
        assert sum(sums.num_requests for sums in cells.values()) == sum(
            value.num_requests for value in expected[0].values()
        )
        assert spent == pytest.approx(expected[1])


def test_lines_appended_during_a_checkpoint_are_read(tmp_path, monkeypatch):
    append_requests(tmp_path, *range(5))
    write = totals_module.write_checkpoint

    def append_then_write(path, checkpoint):
        if not (tmp_path / "requests-late.jsonl").exists():
            append_requests(tmp_path, 5, 6)
            append_requests(tmp_path, 7, session="late")
        write(path, checkpoint)

    monkeypatch.setattr(totals_module, "write_checkpoint", append_then_write)
    read_totals(tmp_path)
    monkeypatch.setattr(totals_module, "write_checkpoint", write)
    assert cells_and_spend(read_totals(tmp_path)) == read_whole_ledger(tmp_path, monkeypatch)


def test_failure_to_write_a_checkpoint_is_logged_and_totals_stay_correct(tmp_path, monkeypatch, caplog):
    append_requests(tmp_path, 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(totals_module, "write_checkpoint", fail)
    totals = read_totals(tmp_path)
    append_requests(tmp_path, 2)
    totals.catch_up()
    assert "No space left on device" in caplog.text
    assert cells_and_spend(totals) == read_whole_ledger(tmp_path, monkeypatch)


def test_checkpoint_is_written_after_enough_records(tmp_path, monkeypatch):
    monkeypatch.setattr(totals_module, "_MIN_UNSAVED", 4)
    append_requests(tmp_path, *range(3))
    totals, path = read_totals(tmp_path), tmp_path / "totals.jsonl"
    assert not path.exists()
    append_requests(tmp_path, *range(3, 5))
    totals.catch_up()  # writes a checkpoint after the fourth record
    written = path.read_bytes()
    append_requests(tmp_path, *range(5, 7))
    totals.catch_up()
    assert path.read_bytes() == written
    append_requests(tmp_path, 7)
    totals.catch_up()
    assert path.read_bytes() != written
    assert read_totals(tmp_path).prices == totals.prices


def test_interrupted_first_read_is_saved(tmp_path, monkeypatch, parsed_lines):
    monkeypatch.setattr(totals_module, "_MIN_UNSAVED", 10)
    append_requests(tmp_path, *range(45))
    read = totals_module.RequestReader.iter_new

    def interrupted_read(reader):
        for number, record in enumerate(read(reader)):
            if number == 35:
                raise KeyboardInterrupt
            yield record

    with monkeypatch.context() as interrupted_process:
        interrupted_process.setattr(totals_module.RequestReader, "iter_new", interrupted_read)
        with pytest.raises(KeyboardInterrupt):
            read_totals(tmp_path)
    parsed_lines.clear()
    result = read_totals(tmp_path)
    assert len(parsed_lines) == 15
    assert cells_and_spend(result) == read_whole_ledger(tmp_path, monkeypatch)


def test_old_sums_are_merged_by_hour_and_day(tmp_path, monkeypatch):
    for number in range(100 * 24):
        finished_at = 1e9 + number * 3600 + number % 3600
        usage = {"started_at": finished_at - 1, "finished_at": finished_at}
        append_request(tmp_path, make_request_usage(f"r{number}", usd=number / 7, **usage))
    monkeypatch.setattr(totals_module, "_MIN_UNSAVED", 400)
    newest, cells = finished_at // 60, read_totals(tmp_path).cells
    for cell in cells:
        age = newest - cell.minute
        assert cell.minute % (1 if age < 2 * 1440 else 60 if age < 60 * 1440 else 1440) == 0
    assert len(cells) < 40 + 60 * 24 + 2  # one per day, and one per hour in the last 60 days
    spent = sum(sums.usd for sums in cells.values())
    assert spent == pytest.approx(sum(sums.usd for sums in read_whole_ledger(tmp_path, monkeypatch)[0].values()))
    assert sum(sums.num_requests for sums in cells.values()) == 100 * 24


class Follower:
    def __init__(self):
        self.usd_at_start, self.received = None, []

    def on_attach(self, totals):
        self.usd_at_start = dict(totals.budgets.ledger_usd)

    def on_ledger_record(self, request):
        self.received.append(request.request_id)


def test_follower_receives_each_later_record_once(tmp_path):
    append_requests(tmp_path, 1)
    read_totals(tmp_path)
    append_requests(tmp_path, 2)
    totals, early, late = Totals(tmp_path), Follower(), Follower()
    totals.add_follower(early)
    assert not totals.is_loaded
    totals.catch_up()
    totals.add_follower(late)
    append_requests(tmp_path, 3)
    totals.catch_up()
    assert (early.usd_at_start, early.received) == ({"bob": 1 / 7}, ["r2", "r3"])
    assert (late.usd_at_start, late.received) == ({"bob": 1 / 7, "alice": 2 / 7}, ["r3"])


def test_adding_a_follower_does_not_wait_for_a_read(tmp_path, monkeypatch):
    append_requests(tmp_path, 1)
    totals, may_end, follower = Totals(tmp_path), threading.Event(), Follower()

    def read_slowly(reader):
        may_end.wait(10)
        yield make_request_usage("late")

    monkeypatch.setattr(totals_module.RequestReader, "iter_new", read_slowly)
    totals.read_in_background()
    totals.add_follower(follower)
    assert follower.usd_at_start is None
    may_end.set()
    totals._thread.join()
    assert (follower.usd_at_start, follower.received) == ({}, ["late"])


def test_recent_requests_include_requests_from_the_checkpoint(tmp_path):
    append_requests(tmp_path, *range(20))
    read_totals(tmp_path)
    totals = read_totals(tmp_path)
    assert {record.request_id for record in totals.recent(1000 + 30 * 17)} == {"r17", "r18", "r19"}


def price_after(*requests):
    price = TokenPrice()
    for request in requests:
        price.update(request)
    return price


def test_prices_of_prompt_and_output():
    price = price_after(make_request_usage())
    assert price.usd_per_prompt_token == pytest.approx(0.2 * 0.01 / 100)
    assert price.usd_per_output_token == pytest.approx(2 * 0.01 / 40)
    assert price.max_usd(prompt_tokens=1000, output_tokens=10) == pytest.approx(0.02 + 0.005)


@pytest.mark.parametrize(
    "cheap",
    [
        {"busy_s": 0.275, "usd": 0.00275},  # one of eight concurrent requests
        {"num_output_tokens": 328, "num_choices": 8},
        {
            "num_output_tokens": 81,
            "speculation": SpeculationStats(num_drafts=40, num_draft_tokens=120, accepted_per_position=(40, 0, 0)),
        },
        {"num_prompt_tokens": 1100, "num_cached_tokens": 1000},
    ],
    ids=["concurrent", "choices", "drafts", "cached"],
)
def test_cheap_requests_do_not_lower_the_price(cheap):
    """The attack would be a hundred cheap requests, then many concurrent expensive ones."""
    price, usual = price_after(*[make_request_usage(**cheap)] * 100), price_after(make_request_usage())
    assert price.usd_per_output_token == pytest.approx(usual.usd_per_output_token)
    assert price.usd_per_prompt_token == pytest.approx(usual.usd_per_prompt_token)


def test_single_token_choices_do_not_lower_the_price():
    first_token_only = {"num_output_tokens": 10, "num_choices": 10, "busy_s": 0.2, "finished_at": 1000.2, "usd": 0.002}
    assert (
        price_after(*[make_request_usage(**first_token_only)] * 100).usd_per_output_token
        >= price_after(make_request_usage()).usd_per_output_token
    )
    mixed = price_after(*[make_request_usage(**first_token_only)] * 100, make_request_usage())
    assert mixed.usd_per_output_token == pytest.approx(price_after(make_request_usage()).usd_per_output_token)


def test_long_prompts_do_not_raise_the_output_price():
    long_request = make_request_usage(num_prompt_tokens=10_000, ttft_s=20.0, finished_at=1022.0, busy_s=22.0, usd=0.22)
    assert price_after(long_request).usd_per_output_token == pytest.approx(0.0005)
    assert price_after(long_request).usd_per_prompt_token == pytest.approx(0.00002)


def test_price_is_lower_if_requests_share_the_engine():
    # Each of four concurrent requests is billed a quarter of 2.2 s.
    price = price_after(make_request_usage(busy_s=0.55, usd=0.0055))
    assert price.expected_usd(prompt_tokens=100, output_tokens=40) == pytest.approx(0.0055)
    single = price_after(make_request_usage())
    assert single.expected_usd(prompt_tokens=100, output_tokens=40) == pytest.approx(0.022)
    assert TokenPrice().expected_usd(prompt_tokens=1, output_tokens=1) is None


def test_prompt_price_is_at_most_the_output_price():
    short_request = make_request_usage(num_prompt_tokens=1)
    assert price_after(short_request).usd_per_prompt_token == price_after(short_request).usd_per_output_token
    without_ttft = make_request_usage(ttft_s=None)  # its whole time counts as output
    assert price_after(without_ttft).usd_per_output_token == pytest.approx(2.2 * 0.01 / 41)
    assert price_after(without_ttft).usd_per_prompt_token == price_after(without_ttft).usd_per_output_token


def test_price_follows_recent_requests():
    expensive = make_request_usage(finished_at=1020.2, busy_s=20.2, usd=0.202)
    price = price_after(*[expensive] * 50, *[make_request_usage()] * 200)
    assert price.usd_per_output_token == pytest.approx(0.0005, rel=0.25)


@pytest.mark.parametrize("change", [{"outcome": "failed", "usd": 0.0}, {"num_output_tokens": 0}, {"busy_s": 0.0}])
def test_failed_or_empty_requests_give_no_price(change):
    price = price_after(make_request_usage(**change))
    assert not price.is_known
    assert price.max_usd(prompt_tokens=1, output_tokens=1) is None


def test_price_is_zero_if_requests_cost_nothing():
    assert price_after(make_request_usage(usd=0.0)).max_usd(prompt_tokens=1, output_tokens=1) == 0
