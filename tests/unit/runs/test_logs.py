import threading

import pytest

from peagle.runs import logs
from peagle.runs.logs import LogCopy, copy_log, logs_folder
from peagle.storage import storage_path

ROOT = storage_path("s3://bucket/run")


def copy_of(name):
    return (ROOT / "logs" / name).read_bytes()


def test_logs_folder_is_local_and_differs_between_runs(tmp_path):
    assert logs_folder(tmp_path) == tmp_path / "logs"
    folder = logs_folder(ROOT)
    assert folder.is_absolute()
    assert folder != logs_folder(storage_path("s3://bucket/other"))


def test_only_the_end_of_a_long_changed_log_is_copied(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_BYTES", 10)
    log = tmp_path / "engine.log"
    copy = LogCopy(ROOT, log, "engine.log")
    copy.update()
    log.write_text("started")
    copy.update()
    copy.update()
    assert copy_of("engine.log") == b"started"
    assert s3.count("PUT", "engine.log") == 1
    log.write_text("started and ended")
    copy.update()
    assert copy_of("engine.log") == b" and ended"


def test_failed_copy_of_a_log_is_repeated(s3, tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("why")
    copy = LogCopy(ROOT, log, "engine.log")
    s3.fail(403, method="PUT")
    copy.update()
    copy.update()
    assert copy_of("engine.log") == b"why"


def test_log_is_copied_periodically_and_at_the_end(s3, tmp_path):
    log = tmp_path / "driver.log"
    log.write_text("one")
    with pytest.raises(ZeroDivisionError), copy_log(ROOT, log, "driver-1.log", every_s=0.05):
        _wait_for_copy_and_fail(log)
    assert copy_of("driver-1.log") == b"one two"


def _wait_for_copy_and_fail(log):
    never_set = threading.Event()
    for _ in range(200):
        if (ROOT / "logs" / "driver-1.log").exists():
            log.write_text("one two")
            raise ZeroDivisionError
        never_set.wait(0.05)
    raise AssertionError("no copy was made")


def test_logs_of_local_runs_are_not_copied(tmp_path):
    log = tmp_path / "logs" / "driver.log"
    log.parent.mkdir()
    log.write_text("one")
    with copy_log(tmp_path, log, "driver-1.log"):
        pass
    assert [path.name for path in log.parent.iterdir()] == ["driver.log"]
