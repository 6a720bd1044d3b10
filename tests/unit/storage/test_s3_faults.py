"""Checks that nothing is lost or written twice if S3 fails, and that errors state the reason."""

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from peagle.errors import ConfigError, StorageError
from peagle.storage import (
    atomic_file,
    open_to_read,
    remove_temporaries,
    require_usable,
    s3_client,
    s3_files,
    s3_path,
    storage_path,
    write_atomic,
    write_once,
)

FOLDER = storage_path("s3://bucket/run")
WRITE_FAULTS = [500, 503, 409, "connection_cut", "response_lost"]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(s3_client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(s3_client, "_MAX_PAUSE_S", 0.05)


@pytest.fixture
def s3_with_short_timeouts(s3, monkeypatch):
    monkeypatch.setattr(s3_client, "SHORT_PATIENCE_S", 0.2)
    store = s3_client.ObjectStore(patience_s=0.5)
    monkeypatch.setattr(s3_client, "store", lambda: store)
    return s3


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_write_once_succeeds_after_repeated_faults(s3, fault):
    s3.fail(fault, method="PUT", times=6)
    assert write_once(FOLDER / "unit", b"rows")
    assert (FOLDER / "unit").read_bytes() == b"rows"
    assert s3.count("PUT", "/bucket/run/unit") >= 6
    assert not write_once(FOLDER / "unit", b"other rows")


def test_write_once_recognises_its_own_object(s3):
    s3.fail("response_lost", method="PUT")
    assert write_once(FOLDER / "unit", b"own")
    assert s3.count("PUT", "unit") == 2
    assert s3.count("HEAD", "unit") == 1


def test_write_once_does_not_claim_an_equal_object_of_another_writer(s3):
    assert write_once(FOLDER / "unit", b"rows")
    s3.fail("response_lost", method="PUT")
    assert not write_once(FOLDER / "unit", b"rows")


def test_write_once_retries_after_deletion(s3, monkeypatch):
    write_once(FOLDER / "unit", b"other")
    original = s3_client.ObjectStore.writer_of

    def writer_of_after_deletion(store, address, conflict):
        store.delete(address)
        return original(store, address, conflict)

    monkeypatch.setattr(s3_client.ObjectStore, "writer_of", writer_of_after_deletion)
    assert write_once(FOLDER / "unit", b"own")
    assert (FOLDER / "unit").read_bytes() == b"own"


def test_each_file_is_written_by_one_of_many_writers(s3):
    s3.fail_often(0.4, seed=7)
    written, barrier = [], threading.Barrier(6)

    def commit(number):
        barrier.wait()
        for unit in range(5):
            if write_once(FOLDER / f"unit-{unit}", b"%d" % number):
                written.append((unit, number))

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(unit for unit, _ in written) == list(range(5))
    assert {unit: int((FOLDER / f"unit-{unit}").read_bytes()) for unit in range(5)} == dict(written)


@pytest.mark.parametrize("fault", [500, 503, "connection_cut", "response_lost", "body_truncated"])
def test_read_list_and_delete_succeed_after_faults(s3, fault):
    data = os.urandom(200_000)
    write_atomic(FOLDER / "file", data)
    s3.fail(fault, times=3)
    assert (FOLDER / "file").read_bytes() == data
    s3.fail(fault, times=3)
    with open_to_read(FOLDER / "file") as file:
        assert file.read() == data
    s3.fail(fault, times=3)
    assert [path.name for path in FOLDER.iterdir()] == ["file"]
    s3.fail(fault, times=3)
    (FOLDER / "file").unlink()
    assert not (FOLDER / "file").exists()


def test_listing_is_paginated(s3):
    for number in range(5):
        write_atomic(FOLDER / f"{number}", b"")
    s3.fail(503, method="GET", times=2)
    address = s3_client.Address("bucket", "run")
    assert [path.name for path in s3_client.store().entries(address, page_size=2)] == ["0", "1", "2", "3", "4"]


def test_unchanged_objects_are_read_from_the_cache(s3):
    def read_all():
        return [path.read_bytes() for path in FOLDER.glob("beat-*")]

    write_atomic(FOLDER / "beat-1", b"one")
    write_atomic(FOLDER / "beat-2", b"one")
    assert read_all() == [b"one", b"one"]
    num_reads = s3.count("GET", "beat-")
    assert num_reads == 2
    assert read_all() == [b"one", b"one"]
    assert s3.count("GET", "beat-") == num_reads
    write_atomic(FOLDER / "beat-2", b"two")
    num_reads = s3.count("GET", "beat-1")
    assert read_all() == [b"one", b"two"]
    assert s3.count("GET", "beat-1") == num_reads
    assert s3.count("GET", "beat-") == 3


def test_threads_share_one_store(s3):
    s3_client.forget_store()
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: s3_client.store(), range(8)))) == 1


# --- permanent failures


def test_unavailable_store_times_out(s3_with_short_timeouts, monkeypatch):
    write_once(FOLDER / "unit-1", b"rows")
    s3_with_short_timeouts.fail(503, times=10_000)
    started_at = time.monotonic()
    with pytest.raises(StorageError) as error:
        write_once(FOLDER / "unit-2", b"rows")
    assert 0.3 < time.monotonic() - started_at < 60  # by default, it takes minutes until a request times out
    for words in (
        "s3://bucket/run/unit-2: cannot be written",
        "s; the last error",
        "SlowDown",
        "committed units are safe",
    ):
        assert words in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)

    monkeypatch.setattr(s3_client, "SHORT_PATIENCE_S", 0)
    before = s3_with_short_timeouts.count("PUT", "unit-2")
    assert before > 2
    with pytest.raises(StorageError):
        write_once(FOLDER / "unit-2", b"rows")
    assert s3_with_short_timeouts.count("PUT", "unit-2") == before + 1  # after a failure, requests are not repeated
    s3_with_short_timeouts.reset_faults()
    assert write_once(FOLDER / "unit-2", b"rows")
    assert sorted(path.name for path in FOLDER.iterdir()) == ["unit-1", "unit-2"]


def test_timed_out_commit_is_not_repeated(s3_with_short_timeouts):
    s3_with_short_timeouts.fail("response_lost", times=10_000)
    with pytest.raises(StorageError):
        write_once(FOLDER / "unit", b"first attempt")
    s3_with_short_timeouts.reset_faults()
    assert not write_once(FOLDER / "unit", b"second attempt")
    assert (FOLDER / "unit").read_bytes() == b"first attempt"


def test_access_denied_is_not_retried(s3):
    s3.fail(403, times=10)
    with pytest.raises(
        StorageError, match=r"run/unit: cannot be written: .*AccessDenied(.|\n)*s3:GetObject, PutObject"
    ):
        write_once(FOLDER / "unit", b"")
    assert s3.count("PUT", "unit") == 1


def test_missing_bucket_is_an_error(s3):
    with pytest.raises(ConfigError, match=r"s3://nowhere/run(.|\n)*create the bucket"):
        require_usable(storage_path("s3://nowhere/run"))
    with pytest.raises(StorageError, match=r"s3://nowhere/run(.|\n)*create the bucket"):
        (storage_path("s3://nowhere/run") / "run.json").read_bytes()


def test_missing_credentials_are_an_error(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match=r"there are no credentials(.|\n)*AWS_ACCESS_KEY_ID"):
        require_usable(FOLDER)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_invalid_s3_endpoint_is_refused(s3_with_short_timeouts, monkeypatch, url):
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(ConfigError, match=rf"{url}(.|\n)*AWS_ENDPOINT_URL"):
        require_usable(FOLDER)


def test_store_that_ignores_write_conditions_is_refused(s3):
    s3.ignores_conditions = True
    with pytest.raises(ConfigError, match=r"no conditional writes(.|\n)*local disk"):
        require_usable(FOLDER)
    assert not FOLDER.is_dir()


def test_store_without_conditional_writes_is_refused(s3):
    s3.fail(501, method="PUT", times=10)
    with pytest.raises(ConfigError, match="no conditional writes"):
        require_usable(FOLDER)


# --- large objects


@pytest.fixture
def large_data(monkeypatch):
    """Data that is uploaded in three parts."""
    monkeypatch.setattr(s3_files, "_PART_BYTES", 5 << 20)
    return os.urandom(12 << 20)


@pytest.mark.parametrize("fault", [None, 503, "response_lost"])
def test_multipart_upload_is_atomic(s3, large_data, fault):
    with atomic_file(FOLDER / "export") as file:
        for start in range(0, len(large_data), 1 << 20):
            file.write(large_data[start : start + (1 << 20)])
        assert not (FOLDER / "export").exists()
        if fault:
            s3.fail(fault, method="PUT", times=2)
            s3.fail(fault, method="POST", times=1)
    assert (FOLDER / "export").read_bytes() == large_data
    assert remove_temporaries(FOLDER) == 0


def test_failed_multipart_upload_is_aborted(s3, large_data):
    with pytest.raises(TypeError), atomic_file(FOLDER / "export") as file:
        file.writelines([large_data, "not bytes"])
    assert remove_temporaries(FOLDER) == 0
    assert not FOLDER.is_dir()


def test_old_multipart_uploads_are_aborted(s3, large_data):
    unfinished = s3_files._Writer(s3_client.store(), s3_client.Address("bucket", "run/export"))
    unfinished.write(large_data)
    assert remove_temporaries(FOLDER, older_than_s=60) == 0  # another process might still be writing it
    s3.upload_age_s = 100
    assert remove_temporaries(FOLDER, older_than_s=60) == 1
    assert remove_temporaries(FOLDER) == 0


def test_reading_a_replaced_object_fails(s3, monkeypatch):
    path = FOLDER / "large"
    monkeypatch.setattr(s3_files, "_TAIL_BYTES", 10)
    monkeypatch.setattr(s3_path, "READ_AHEAD_BYTES", 10)
    write_atomic(path, b"old." * 100)
    with open_to_read(path) as file:
        assert file.read(8) == b"old.old."
        write_atomic(path, b"new." * 100)
        with pytest.raises(StorageError, match="was replaced while it was read"):
            file.read()
