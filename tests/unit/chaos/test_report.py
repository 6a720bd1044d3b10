from tests.chaos.report import summary, to_markdown, write


def played(name, engine, *kinds, problems=(), num_lost=0):
    return {
        "name": name, "engine": engine, "own_cluster": False, "wall_s": 10.0, "problems": list(problems),
        "kills": [{"kind": kind, "at_s": 1.5} for kind in kinds],
        "attempts": [{"exit_code": code, "wall_s": 5.0, "last_words": ""} for code in (-9, 0)],
        "audit": {
            "num_rows": 100, "num_lost": num_lost, "num_doubled": 0, "num_dead_letters": 0, "num_output_tokens": 1500,
            "num_regenerated_tokens": 30, "regenerated_usd": 0.001, "total_usd": 0.01, "num_sessions": 5,
        },
    }  # fmt: skip


def test_runs_and_kills_are_added_up_by_kind_of_engine(tmp_path):
    results = [
        played("fake-000", "fake", "engine", "node"),
        played("fake-001", "fake", "engine", "driver", problems=["row 3 is in no committed unit"], num_lost=1),
        played("real-002", "real", "actor"),
        {"name": "fault-x", "engine": "fault", "fault": "x", "what": "y", "skipped": "no | mounts", "problems": []},
    ]
    total = summary(results, "fake")
    assert total["kills"] == {"engine": 2, "actor": 0, "node": 1, "driver": 1}
    assert (total["num_runs"], total["num_failed_runs"], total["num_kills"], total["num_attempts"]) == (2, 1, 4, 4)
    assert (total["num_rows"], total["num_lost"], total["num_regenerated_tokens"]) == (200, 1, 60)
    path = write(tmp_path, results, seed=3, command="make chaos")
    page = path.read_text()
    assert "| rows lost | 1 | 0 |" in page
    assert "- fake-001: row 3 is in no committed unit" in page
    assert "| x | y | skipped: no / mounts |" in page
    assert path.with_suffix(".json").exists()


def test_a_run_that_was_never_done_has_no_figures():
    failed = {**played("fake-000", "fake", "node", problems=["the run hung"]), "audit": None}
    data = {
        "date": "2026-11-21", "seed": 1, "command": "c", "git_revision": "r", "machine": "m", "versions": {},
        "engines": {engine: summary([failed], engine) for engine in ("fake", "real")}, "results": [failed],
    }  # fmt: skip
    page = to_markdown(data)
    assert "| fake-000 | several nodes | node 2 s | -9, 0 | 10 | - | - | - | - |" in page
    assert "- fake-000: the run hung" in page
