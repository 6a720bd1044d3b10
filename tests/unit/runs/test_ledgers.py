import json
import re
from dataclasses import replace

import pytest

from peagle.drafter.config import DECODING_MODES, TrainConfig
from peagle.economics.ledger import read_session_file, sessions_to_parquet, write_batch
from peagle.economics.spending import Days, Spend, charges, day_of
from peagle.errors import ConfigError, PeagleError, PriceError
from peagle.runs.ledgers import find_ledgers, ledger_folders, require_runs
from peagle.storage import storage_path, write_atomic
from tests.unit.economics.month import (
    BULK_SESSION,
    make_unit_usage,
    timestamp,
    write_endpoint,
    write_nightly,
    write_run,
)
from tests.unit.pipelines.online.ledgers import make_request_usage


def total_spend(sources, days=None):
    return sum((charge.spend for ledger in sources.ledgers for charge in charges(ledger, days or Days())), Spend())


@pytest.fixture
def month(tmp_path, monkeypatch):
    """The example month of docs/reference/worked-month.md, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_endpoint(tmp_path / "serve")
    write_nightly(tmp_path / "nightly")
    return tmp_path


def test_ledgers_are_found_by_name_and_glob(month):
    (month / "other").mkdir()
    (month / "file").touch()
    by_name = find_ledgers(["serve", "nightly"])
    assert [ledger.run for ledger in by_name.ledgers] == ["serve", "nightly"]
    by_glob = find_ledgers(["*"])
    assert total_spend(by_glob) == total_spend(by_name)
    assert by_glob.notes == ("1 folder without a run or an endpoint's state: other",)


def test_endpoint_state_is_refused_where_a_run_is_required(month):
    require_runs(["nightly", "nothing"])
    with pytest.raises(ConfigError, match="serve is the state of an endpoint") as error:
        require_runs(["nightly", "serve"])
    assert "peagle cost serve" in error.value.hint


def test_folder_with_several_names_counts_once(month):
    (month / "latest").symlink_to("nightly")
    sources = find_ledgers(["nightly", "*", str(month / "nightly"), "./serve"])
    assert len(sources.ledgers) == 2


def test_runs_with_fake_engines_or_assumed_prices_have_notes(month):
    for name, changes in (("fake", {"config": {"engine": "fake"}}), ("guess", {})):
        write_nightly(month / name)
        path = month / name / "run.json"
        manifest = json.loads(path.read_text()) | changes
        manifest["price"]["basis"] = "assumed" if name == "guess" else "stated"
        path.write_text(json.dumps(manifest))
    assert find_ledgers(["serve", "nightly"]).notes == ()
    assert find_ledgers(["*"]).notes == (
        "FAKE ENGINE: speed and dollars are not real (1 of 4 sources: fake)",
        "price assumed (1 of 4 sources: guess)",
    )


def test_endpoints_with_fake_engines_or_assumed_prices_have_notes(month):
    path = next((month / "serve" / "ledger").glob("session-*.parquet"))
    (session,) = read_session_file(path)
    write_atomic(path, sessions_to_parquet([replace(session, is_stand_in=True, price_basis="assumed")]))
    assert find_ledgers(["serve", "nightly"]).notes == (
        "FAKE ENGINE: speed and dollars are not real (1 of 2 sources: serve)",
        "price assumed (1 of 2 sources: serve)",
    )


def test_ledgers_of_a_training_run_include_its_response_runs(month):
    config = TrainConfig(prompts=["stdlib"], output=month / "heads")
    for mode in DECODING_MODES:
        write_nightly(config.responses_folder(mode))
    response_runs = ["heads/responses/greedy", "heads/responses/sampled"]
    before = find_ledgers(["heads"])
    assert [ledger.run for ledger in before.ledgers] == response_runs
    assert before.notes == ()
    (month / "serve" / "ledger").rename(config.output / "ledger")
    (config.output / "run.json").write_text('{"head": "heads/head"}')
    sources = find_ledgers(["heads"])
    assert [ledger.run for ledger in sources.ledgers] == ["heads", *response_runs]
    assert total_spend(find_ledgers(["heads", "heads/responses/*", "heads/"])) == total_spend(sources)
    assert ledger_folders(["heads"]).keys() == {"heads", *response_runs}


@pytest.mark.parametrize("sources", [["nothing"], ["serve", "nothing"], ["no*"], ["empty"]])
def test_missing_source_is_an_error(month, sources):
    (month / "empty").mkdir()
    with pytest.raises(ConfigError, match=re.escape(f"{sources[-1]}: neither a run nor")):
        find_ledgers(sources)


def test_sessions_of_a_run_have_the_model_the_tags_and_the_price_of_its_manifest(month):
    (ledger,) = find_ledgers(["nightly"]).ledgers
    (session,) = ledger.sessions
    assert (session.model, session.drafter, session.tags) == ("smollm2-135m", None, '{"team": "data"}')
    assert (session.instance_type, session.region) == ("c7a.large", "us-east-1")
    assert session.usd_per_device_s * 2 * 3600 == pytest.approx(0.10264)


def test_batch_run_is_not_counted_again_next_to_its_endpoint(month):
    units = [make_unit_usage("bulk", busy_s=10.0, tokens=5, finished_at=timestamp(11, 30, 23))]
    write_run(month / "batches", [BULK_SESSION], units, command=("POST", "/v1/batches", "batch_1"))
    batches_only = find_ledgers(["batches"])
    assert total_spend(batches_only).attributed_usd == pytest.approx(10 * 0.10264 / 3600)
    endpoint_only = total_spend(find_ledgers(["serve"]))
    write_batch(month / "serve" / "ledger", make_request_usage("batch_1", session_id="batch_1", usd=3.0))
    both = find_ledgers(["serve", "batches"])
    assert total_spend(both).attributed_usd == pytest.approx(endpoint_only.attributed_usd + 3.0)
    assert total_spend(both).idle_usd == pytest.approx(endpoint_only.idle_usd)
    assert both.notes == ("1 batch run counted in an endpoint's ledger.",)


def test_sessions_on_engines_of_an_endpoint_are_not_counted_in_the_run(month):
    lent = "20261101T000000-lent"  # counted in the ledger of the endpoint that lent its engine
    units = [make_unit_usage(name, busy_s=10.0, tokens=5, finished_at=timestamp(11, 30, 23)) for name in ("bulk", lent)]
    write_run(month / "batches", [BULK_SESSION, replace(BULK_SESSION, session_id=lent)], units)
    assert total_spend(find_ledgers(["batches"])).attributed_usd == pytest.approx(10 * 0.10264 / 3600)


def test_unit_without_session_is_an_error(month):
    write_run(month / "lost", [], [make_unit_usage("gone", busy_s=1.0, tokens=1, finished_at=timestamp(11, 1, 1))])
    with pytest.raises(PeagleError, match="not in the ledger: gone"):
        find_ledgers(["lost"])


def test_price_for_another_device_is_refused(month):
    write_run(month / "gpu", [replace(BULK_SESSION, device="accelerator")], [])
    with pytest.raises(PriceError, match="per vcpu"):
        find_ledgers(["gpu"])


def test_ledgers_on_s3_have_the_same_spending(month, s3):
    remote = storage_path("s3://bucket/month")
    for path in (path for path in month.rglob("*") if path.is_file()):
        target = remote
        for part in path.relative_to(month).parts:
            target = target / part
        write_atomic(target, path.read_bytes())
    day = day_of(timestamp(11, 3, 12))
    for days in (Days(), Days(day, day)):
        stored, local = (total_spend(find_ledgers([source]), days) for source in ("s3://bucket/month/*", "*"))
        assert stored == local
    with pytest.raises(ConfigError, match="only the last part"):
        find_ledgers(["s3://bucket/m*/serve"])
