"""Storage operations on disk and on S3."""

import pytest

from peagle.errors import ConfigError
from peagle.storage import (
    atomic_file,
    is_remote,
    open_to_read,
    remove_temporaries,
    require_usable,
    storage_path,
    write_atomic,
    write_json,
    write_once,
)
from peagle.storage.s3_path import S3Path


@pytest.fixture
def folder(root):
    root.mkdir(parents=True, exist_ok=True)
    return root


def file_names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def test_write_once_does_not_replace_a_file(folder):
    assert write_once(folder / "unit", b"first")
    assert not write_once(folder / "unit", b"second")
    assert (folder / "unit").read_bytes() == b"first"
    assert file_names(folder) == ["unit"]


def test_write_atomic_and_write_json_replace_a_file(folder):
    write_atomic(folder / "file", b"old")
    write_atomic(folder / "file", b"new")
    assert (folder / "file").read_bytes() == b"new"
    write_json(folder / "file", {"a": 1})
    assert (folder / "file").read_bytes() == b'{\n  "a": 1\n}\n'


def test_atomic_file_appears_when_it_is_complete(folder):
    with atomic_file(folder / "export") as file:
        file.write(b"some ")
        assert not (folder / "export").exists()
        file.write(b"more")
    with pytest.raises(TypeError), atomic_file(folder / "export") as file:
        file.write("not bytes")
    assert (folder / "export").read_bytes() == b"some more"
    assert (folder / "export").stat().st_size == 9
    assert remove_temporaries(folder) == 0


def test_files_are_listed_by_pattern(folder):
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for name in ("unit-1.json", "unit-2.json", "unit-2.txt", "other"):
        write_atomic(folder / name, b"")
    write_atomic(folder / "sub" / "deep", b"")
    assert file_names(folder) == ["other", "sub", "unit-1.json", "unit-2.json", "unit-2.txt"]
    assert file_names(folder, "unit-*.json") == ["unit-1.json", "unit-2.json"]
    assert file_names(folder, "unit-2*") == ["unit-2.json", "unit-2.txt"]
    assert sorted(path.name for path in folder.iterdir()) == file_names(folder)
    assert (folder / "sub").is_dir()
    assert not (folder / "none").is_dir()
    assert ((folder / "unit-1.json").stem, (folder / ".lease").stem) == ("unit-1", ".lease")


def test_missing_file_is_an_error_except_for_exists_and_unlink(folder):
    assert not (folder / "none").exists()
    for read in (lambda path: path.read_bytes(), open_to_read, lambda path: path.stat()):
        with pytest.raises(FileNotFoundError, match="none"):
            read(folder / "none")
    (folder / "none").unlink(missing_ok=True)
    write_once(folder / "none", b"x")
    (folder / "none").unlink()
    assert file_names(folder) == []


@pytest.mark.parametrize("size", [0, 10, 70_000, 9_000_000])
def test_file_is_read_from_any_position(folder, size):
    data = bytes(n % 251 for n in range(1000)) * (size // 1000) + bytes(size % 1000)
    write_atomic(folder / "file", data)
    with open_to_read(folder / "file") as file:
        assert file.read() == data
        for start in (0, size // 2, max(0, size - 66_000), size):
            file.seek(start)
            assert file.read(100_000) == data[start : start + 100_000]
        assert file.seek(-min(8, size), 2) == size - min(8, size)
        assert file.read() == data[max(0, size - 8) :]


def test_require_usable_leaves_no_file(folder):
    require_usable(folder)
    assert file_names(folder) == []


def test_storage_path_parses_paths_and_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage_path("run") == tmp_path / "run"
    assert str(storage_path("s3://bucket/runs/first/")) == "s3://bucket/runs/first"
    assert storage_path(storage_path("s3://bucket/a")) == S3Path("bucket", "a")
    assert [is_remote(storage_path(name)) for name in ("s3://bucket/a", "s3/a")] == [True, False]


@pytest.mark.parametrize(
    "name", ["gs://bucket/run", "s3://", "s3://bucket", "s3://bucket/", "s3://b/a//c", "s3://b/../c"]
)
def test_invalid_storage_paths_are_refused(name):
    with pytest.raises(ConfigError, match="s3://"):
        storage_path(name)
