from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.corpus import files
from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.files import discover
from peagle.corpus.workload import Workload
from peagle.errors import InputError


def found(uri, input_format="auto"):
    return [(Path(file.path).name, file.format) for file in discover(str(uri), input_format)]


def test_a_file_a_folder_or_a_glob(write, tmp_path):
    for name in ("a.jsonl", "b.ndjson.gz", "c.csv.zst", "d.parquet", "notes.txt", ".hidden.jsonl", "readme.md"):
        write(name, b"x")
    everything = [("a.jsonl", "jsonl"), ("b.ndjson.gz", "jsonl"), ("c.csv.zst", "csv"), ("d.parquet", "parquet")]
    assert found(tmp_path) == everything
    assert found(tmp_path / "a.jsonl") == everything[:1]
    assert found(tmp_path / "*js*") == [(".hidden.jsonl", "jsonl"), *everything[:2]]
    assert found(tmp_path, "csv") == [("c.csv.zst", "csv")]
    assert found(tmp_path, "text") == [("notes.txt", "text")]
    assert found(tmp_path, "openai-batch") == [(name, "openai-batch") for name, kind in everything if kind == "jsonl"]


def test_a_folder_of_text_alone_is_a_corpus(write, tmp_path):
    write("a.txt", b"x")
    write("b.txt.gz", b"y")
    assert found(tmp_path) == [("a.txt", "text"), ("b.txt.gz", "text")]


def test_the_format_can_be_said_where_the_name_does_not(write):
    assert found(write("prompts.log.gz", b"x"), "text") == [("prompts.log.gz", "text")]


@pytest.mark.parametrize(
    ("name", "input_format", "message"),
    [
        ("a.docx", "auto", r"unknown format '\.docx'(.|\n)*--input-format"),
        ("prompts", "auto", "unknown format 'no suffix'"),
        ("a.parquet.gz", "auto", "Parquet in gzip is not read"),
        ("folder/readme.md", "auto", "unknown format"),
    ],
)
def test_what_has_no_format_is_named(write, name, input_format, message):
    with pytest.raises(InputError, match=message):
        discover(write(name, b"x"), input_format)


def test_a_folder_without_a_corpus_says_what_it_looked_for(write, tmp_path):
    write("readme.md", b"x")
    with pytest.raises(InputError, match=r"no \.parquet or \.jsonl or"):
        discover(str(tmp_path))
    with pytest.raises(InputError, match=r"no \.csv file"):
        discover(str(tmp_path), "csv")


def test_an_unknown_scheme_is_refused_by_name():
    with pytest.raises(InputError, match="only local files and s3://"):
        discover("gs://bucket/prompts.jsonl")


@pytest.fixture
def bucket(monkeypatch):
    """A bucket in memory in place of the object store."""
    store = fsspec.filesystem("memory", skip_instance_cache=True)
    store.store, store.pseudo_dirs = {}, [""]

    class Store:
        """Paths without a leading slash, as s3fs has them."""

        def glob(self, uri, detail):
            return {k: self._bare(v) for k, v in store.glob(self._path(uri), detail=True).items()}

        def ls(self, uri, detail):
            return [self._bare(info) for info in store.ls(self._path(uri), detail=True)]

        def isfile(self, uri):
            return store.isfile(self._path(uri))

        def info(self, uri):
            return self._bare(store.info(self._path(uri)))

        def open(self, uri, mode):
            return store.open(self._path(uri), mode)

        def _path(self, uri):
            return "/" + uri.removeprefix("s3://").rstrip("/")

        def _bare(self, info):
            return {**info, "name": info["name"].lstrip("/")}

    monkeypatch.setattr(files, "filesystem", lambda path: Store())
    return lambda path, data: store.pipe(f"/{path}", data)


def test_a_parquet_file_in_an_object_store_has_the_fingerprint_that_it_has_on_a_disk(bucket, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 9}), path)
    bucket("prompts/a.parquet", path.read_bytes())
    on_disk, in_store = (
        corpus.scan(corpus.find(uri), Cut(rows_per_unit=9), None, Workload())[2]
        for uri in (str(path), "s3://prompts/a.parquet")
    )
    assert in_store == on_disk


def test_an_object_store_has_files_folders_and_globs(bucket):
    bucket("prompts/a.jsonl", b'{"prompt": "one"}\n{"prompt": "two"}\n')
    bucket("prompts/b.csv", b"prompt\nthree\n")
    assert [file.path for file in discover("s3://prompts/")] == ["s3://prompts/a.jsonl", "s3://prompts/b.csv"]
    assert [file.path for file in discover("s3://prompts/*.csv")] == ["s3://prompts/b.csv"]
    spans, _, _ = corpus.scan(corpus.find("s3://prompts"), Cut(rows_per_unit=1), None, Workload())
    assert [row.columns["prompt"] for span in spans for row in corpus.read(span)] == ["one", "two", "three"]
    with pytest.raises(InputError, match="no such file"):
        discover("s3://prompts/c.jsonl")
