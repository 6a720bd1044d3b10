import json
from concurrent.futures import ThreadPoolExecutor

from jobs import cli


def test_add_list_revoke(tmp_path, capsys):
    path = str(tmp_path / "keys.json")
    assert cli.run(["serve", "keys", "add", "alice", "--keys", path, "--requests-per-min", "60"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("pk-")
    assert cli.run(["serve", "keys", "list", "--keys", path]) == 0
    assert capsys.readouterr().out.strip() == "alice  requests_per_min=60"
    assert cli.run(["serve", "keys", "add", "alice", "--keys", path]) == 2
    assert cli.run(["serve", "keys", "revoke", "alcie", "--keys", path]) == 2
    assert "did you mean alice?" in capsys.readouterr().err
    assert cli.run(["serve", "keys", "revoke", "alice", "--keys", path]) == 0
    assert json.loads((tmp_path / "keys.json").read_text()) == []


def test_changes_at_once_are_all_kept(tmp_path):
    path = str(tmp_path / "keys.json")

    def add(number):
        return cli.run(["serve", "keys", "add", f"key{number}", "--keys", path])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(add, range(24))) == {0}
    assert len(json.loads((tmp_path / "keys.json").read_text())) == 24
