import json
import shutil
import threading
from types import SimpleNamespace

import pytest
from storing import upload

from peagle.catalog import fetched
from peagle.catalog.converted import locked
from peagle.catalog.fetched import ensure_fetched, fetch, find_stored
from peagle.catalog.folders import folder_fingerprint, peagle_home
from peagle.errors import CapacityError, CatalogError, ConfigError, StorageError
from peagle.storage import s3_folder, storage_path, write_atomic

URL = "s3://bucket/models/mine"
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}})


@pytest.fixture
def model(tmp_path, s3):
    """A folder of two shards in a store, next to other objects."""
    folder = tmp_path / "mine"
    folder.mkdir()
    files = {"config.json": b"{}", "model.safetensors.index.json": INDEX.encode(), "empty.txt": b""}
    shards = {"model-1.safetensors": bytes(range(256)) * 1000, "model-2.safetensors": b"x" * 70_000}
    for name, content in (files | shards).items():
        (folder / name).write_bytes(content)
    upload(folder, "models/mine")
    for other in (".gitattributes", "original/weights.pth"):
        write_atomic(storage_path(URL) / other, b"not fetched")
    return folder


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_folder_is_fetched_once(s3, model):
    messages = []
    stored = find_stored(URL)
    assert stored.fingerprint() == folder_fingerprint(model)
    assert stored.weights_bytes == 256_000 + 70_000
    folder = fetch(stored, weights=True, announce=messages.append)
    assert folder == peagle_home() / "fetched" / f"mine-{stored.revision}"
    assert files_of(folder) == files_of(model)
    assert messages[0].startswith(f"fetching {URL} into {folder}: 0.00 GB")
    assert messages[-1].startswith(f"fetching {URL}: 0.00 GB of 0.00 GB after ")
    num_requests = len(s3.requests)
    assert ensure_fetched(URL, stored.revision, weights=True, announce=messages.append) == folder
    assert len(s3.requests) == num_requests


def test_missing_or_truncated_files_are_fetched_again(s3, model):
    stored = find_stored(URL)
    folder = fetch(stored, weights=True)
    (folder / "model-1.safetensors").unlink()
    (folder / "config.json").write_bytes(b"")
    assert ensure_fetched(URL, stored.revision, weights=True, announce=print) == folder
    assert files_of(folder) == files_of(model)


def test_the_tokenizer_does_not_wait_for_weights(s3, model):
    stored = find_stored(URL)
    path = peagle_home() / "fetched" / f".mine-{stored.revision}.weights.lock"
    path.parent.mkdir(parents=True)
    with locked(path):
        folder = ensure_fetched(URL, stored.revision, weights=False, announce=print)
    assert sorted(files_of(folder)) == ["config.json", "empty.txt", "model.safetensors.index.json"]


def test_concurrent_processes_fetch_once(s3, model):
    stored = find_stored(URL)
    messages = []
    path = peagle_home() / "fetched" / f".mine-{stored.revision}.weights.lock"
    path.parent.mkdir(parents=True)
    is_waiting = threading.Event()

    def announce(message):
        messages.append(message)
        is_waiting.set()

    with locked(path):
        waiting_thread = threading.Thread(target=fetch, args=[stored], kwargs={"weights": True, "announce": announce})
        waiting_thread.start()
        assert is_waiting.wait(10)
        assert messages == [f"{URL}: waiting for another process on this node, which is fetching the model"]
        folder = peagle_home() / "fetched" / f"mine-{stored.revision}"
        fetched._fetch(stored.path, list(stored.files), folder)
        s3.requests.clear()
    waiting_thread.join(10)
    assert messages[1:] == []
    assert s3.requests == []
    assert files_of(folder) == files_of(model)


@pytest.mark.parametrize("num_fetched_bytes", [120_500, 100_000, 100, 0])
def test_a_killed_fetch_resumes(s3, model, monkeypatch, num_fetched_bytes):
    monkeypatch.setattr(s3_folder, "_PIECE_BYTES", 50_000)
    stored = find_stored(URL)
    folder = fetch(stored)
    file = next(file for file in stored.files if file.name == "model-1.safetensors")
    # The last piece of an interrupted download may be zeros, so it is fetched again.
    damaged = model.joinpath(file.name).read_bytes()[: num_fetched_bytes - num_fetched_bytes % 50_000] + bytes(
        num_fetched_bytes % 50_000
    )
    s3_folder.partial_path(file, folder).write_bytes(damaged)
    s3.requests.clear()
    messages = []
    fetch(stored, weights=True, announce=messages.append)
    assert files_of(folder) == files_of(model)
    first_missing_piece = max(0, num_fetched_bytes - 1) // 50_000
    assert s3.count("GET", "model-1.safetensors") == 6 - first_missing_piece  # the file has 256,000 bytes, 6 pieces
    assert "0.00 GB was already fetched" in messages[0]
    assert not list(folder.glob("*.part"))


def test_failed_requests_are_retried(s3, model):
    stored = find_stored(URL)
    for fault in (500, "connection_cut", "body_truncated"):
        s3.fail(fault, method="GET", path=".safetensors")
    assert files_of(fetch(stored, weights=True)) == files_of(model)


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_file_changed_during_a_fetch_is_an_error(s3, model, change):
    stored = find_stored(URL)
    path = storage_path(URL) / "model-1.safetensors"
    if change == "replaced":
        write_atomic(path, b"y" * 256_000)
    else:
        path.unlink()
    for read in (stored.fingerprint, lambda: fetch(stored, weights=True)):
        with pytest.raises(StorageError, match=f"model-1.safetensors: was {change} while it was read"):
            read()
    with pytest.raises(CatalogError, match=r"been replaced|missing files"):
        ensure_fetched(URL, stored.revision, weights=True, announce=print)


def test_a_full_disk_is_an_error_before_fetching(s3, model, monkeypatch):
    stored = find_stored(URL)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100_000))
    with pytest.raises(CapacityError, match=r"needs 0\.00 GB more, but only 0\.00 GB is free") as caught:
        fetch(stored, weights=True)
    assert "PEAGLE_HOME" in caught.value.hint


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ({"config.json"}, "has no config.json"),
        ({"model-2.safetensors"}, "lists 1 missing files: model-2.safetensors"),
        ({"model-1.safetensors", "model-2.safetensors"}, "has no weights"),
        (None, "contains no files, only these folders: original"),  # all files are removed
    ],
)
def test_incomplete_folders_are_refused(s3, model, removed, message):
    for path in storage_path(URL).iterdir():
        if removed is None or path.name in removed:
            path.unlink()
    with pytest.raises(CatalogError, match=message):
        find_stored(URL)


@pytest.mark.parametrize(
    ("url", "error_class", "message"),
    [
        ("s3://bucket", ConfigError, "does not name a folder in a bucket"),
        ("s3://bucket/nothing/here", CatalogError, "contains no files"),
        ("s3://no-such-bucket/a", StorageError, "NoSuchBucket"),
    ],
)
def test_missing_folders_are_an_error(s3, url, error_class, message):
    with pytest.raises(error_class, match=message):
        find_stored(url)
