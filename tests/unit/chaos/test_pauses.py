"""A short version of `make chaos`: drivers are stopped while another one does the work."""

import pytest

from tests.chaos import pauses

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("scene", "every"),
    [
        ("start", 32),
        pytest.param("continue", 40, marks=pytest.mark.soak),
        pytest.param("retry", 40, marks=pytest.mark.soak),
        pytest.param("retry-alone", 38, marks=pytest.mark.soak),
        pytest.param("finish", 16, marks=pytest.mark.soak),
    ],
)
def test_resumed_driver_does_not_disturb_its_replacement(tmp_path, scene, every):
    found = pauses.run(scene, tmp_path / "plays", ["--every", str(every), "--crossed", "1"])
    assert found["problems"] == []
    assert all(plays["num_plays"] for plays in found["plays"])
    assert all(plays["steps"] for plays in found["plays"])


@pytest.mark.soak
def test_replaced_plan_is_found(tmp_path, monkeypatch):
    """The plays detect their original bug: a resumed driver replaces the other's plan."""
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "sitecustomize.py").write_text(
        "from peagle.files import json_bytes\n"
        "from peagle.storage import write_atomic\n"
        "from peagle.runs import directory, plan\n"
        "def create(self, manifest, planned):\n"
        "    name = 'plan.000000000000.parquet'\n"
        "    write_atomic(self.root / name, plan.plan_to_bytes(planned))\n"
        "    write_atomic(self.root / 'run.json', json_bytes({**manifest, 'plan': name}))\n"
        "    return True\n"
        "directory.RunDirectory.create = create\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'faulty'}:{pauses.ROOT}")
    found = pauses.run("start", tmp_path / "plays", ["--first", "17", "--last", "22"])
    assert found["problems"]
