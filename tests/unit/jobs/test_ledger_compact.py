from jobs import cli
from peagle.economics.ledger import write_batch
from tests.unit.pipelines.online.ledgers import make_request_usage


def test_compaction_reports_the_number_of_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        name = f"batch_{number}"
        write_batch(tmp_path / "serve" / "ledger", make_request_usage(name, session_id=name))
    assert cli.run(["ledger", "compact", "serve"]) == 0
    assert capsys.readouterr().out == "serve: files before 20, now 2\n"
    assert len(list((tmp_path / "serve" / "ledger").iterdir())) == 2
    assert cli.run(["ledger", "compact", "nothing"]) == 2
    assert "nothing: neither a run nor an endpoint's state folder" in capsys.readouterr().err
