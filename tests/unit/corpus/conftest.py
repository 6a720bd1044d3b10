"""A fixture that writes corpus files. Their suffix determines the compression."""

import gzip

import pyarrow as pa
import pytest


def compress(data, suffix):
    if suffix == ".gz":
        half = len(data) // 2
        return gzip.compress(data[:half]) + gzip.compress(data[half:])  # two members, like `cat a.gz b.gz`
    if suffix == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()
    return data


@pytest.fixture
def write(tmp_path):
    """Return a function that writes bytes to a file, compressed according to its suffix, and returns its path."""

    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compress(data, path.suffix))
        return str(path)

    return write
