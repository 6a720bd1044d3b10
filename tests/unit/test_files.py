import threading

import pytest

from peagle import files


def test_write_atomic_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, b"long old content")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_atomic(path, b"old")

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_writers_exactly_one_wins_and_its_bytes_stay(tmp_path):
    path, won = tmp_path / "unit", []
    barrier = threading.Barrier(8)

    def write(number):
        barrier.wait()
        if files.write_once(path, str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert path.read_bytes() == str(won[0]).encode()
    assert list(tmp_path.iterdir()) == [path]


def test_remove_temporaries_takes_only_what_writers_left(tmp_path):
    (tmp_path / ".unit-1.parquet.0123.tmp").touch()
    (tmp_path / "unit-1.parquet").touch()
    assert files.remove_temporaries(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["unit-1.parquet"]


def test_a_file_takes_its_place_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def break_off():
        with files.atomic_file(path) as file:
            file.write(b"half")
            raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        break_off()
    assert path.read_bytes() == b"old"
    with files.atomic_file(path) as file:
        file.write(b"one ")
        assert path.read_bytes() == b"old"
        file.write(b"two")
    assert path.read_bytes() == b"one two"
    assert list(tmp_path.iterdir()) == [path]
