import gzip
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.files import discover
from peagle.corpus.rows import WorkEstimate
from peagle.errors import InputError
from peagle.storage import s3_client


def names_and_formats(uri, input_format="auto"):
    return [(Path(file.path).name, file.format) for file in discover(str(uri), input_format)]


def test_input_is_a_file_folder_or_glob(write, tmp_path):
    for name in ("a.jsonl", "b.ndjson.gz", "c.csv.zst", "d.parquet", "notes.txt", ".hidden.jsonl", "readme.md"):
        write(name, b"x")
    all_files = [("a.jsonl", "jsonl"), ("b.ndjson.gz", "jsonl"), ("c.csv.zst", "csv"), ("d.parquet", "parquet")]
    assert names_and_formats(tmp_path) == all_files
    assert names_and_formats(tmp_path / "a.jsonl") == all_files[:1]
    assert names_and_formats(tmp_path / "*js*") == all_files[:2]
    assert names_and_formats(tmp_path, "csv") == [("c.csv.zst", "csv")]
    assert names_and_formats(tmp_path, "text") == [("notes.txt", "text")]
    assert names_and_formats(tmp_path, "openai-batch") == [
        (name, "openai-batch") for name, format_ in all_files if format_ == "jsonl"
    ]


def test_suffixes_are_not_case_sensitive(write, tmp_path):
    table = pa.table({"prompt": ["d"]})
    pq.write_table(table, tmp_path / "d.PARQUET")
    write("B.CSV", b"prompt\nb\n")
    write("c.csv.GZ", gzip.compress(b"prompt\nc\n"))
    write("a.JsonL.Zst", pa.compress(b'{"prompt": "a"}\n', codec="zstd", asbytes=True))
    write("E.TXT", b"e\n")
    formats = {"B.CSV": "csv", "a.JsonL.Zst": "jsonl", "c.csv.GZ": "csv", "d.PARQUET": "parquet"}
    assert names_and_formats(tmp_path) == list(formats.items())
    assert names_and_formats(tmp_path / "*.[CT]??") == [("B.CSV", "csv"), ("E.TXT", "text")]
    rows = corpus.read_all(discover(str(tmp_path)))
    assert [row["prompt"] for row in rows] == ["b", "a", "c", "d"]


UNKNOWN_FORMAT = (
    "ignored: unknown format; known: .parquet, .jsonl, .ndjson, .csv, .txt; all but .parquet also with .gz or .zst"
)


@pytest.mark.parametrize(
    ("names", "input_format", "expected_notes"),
    [
        (["a.csv", "_SUCCESS", ".b.csv", "README.md", "readme.txt", "LICENSE", "run.py"], "auto", []),
        (["a.csv", "b.JSON", "c.csv.bz2", "d.gz", "part-1"], "auto",
         [f"b.JSON, c.csv.bz2, d.gz and 1 more {UNKNOWN_FORMAT}"]),
        (["a.csv", "b.txt"], "auto", ["b.txt ignored: text is only read in folders without other formats"]),
        (["a.csv", "b.parquet.gz"], "auto",
         ["b.parquet.gz ignored: compressed Parquet is not supported; decompress it"]),
        (["a.csv", "b.jsonl", "c.json"], "csv", ["b.jsonl ignored: not csv", f"c.json {UNKNOWN_FORMAT}"]),
        (["a.csv", "Y=1/M=1/x.PARQUET", "run/run.json", "run/data/unit.parquet", "img/a.png", ".git/a.csv"], "auto",
         ["Y=1/ ignored: subfolders need a glob such as 'FOLDER/**/*.parquet'"]),
    ],
)  # fmt: skip
def test_ignored_files_of_a_folder_are_announced(write, tmp_path, names, input_format, expected_notes):
    for name in names:
        write(name, b"x")
    notes = []
    assert len(discover(str(tmp_path), input_format, announce=notes.append)) == 1
    assert [note.replace(str(tmp_path), "FOLDER") for note in notes] == [
        f"input FOLDER: {note}" for note in expected_notes
    ]


def test_files_of_unknown_formats_are_named_in_the_hint_or_a_note(write, tmp_path, capsys):
    write("a.json", b"{}")
    with pytest.raises(InputError) as error:
        discover(str(tmp_path))
    assert error.value.hint == f"a.json {UNKNOWN_FORMAT}"
    write("a.csv", b"x")
    discover(str(tmp_path))
    assert capsys.readouterr().err == f"note: input {tmp_path}: a.json {UNKNOWN_FORMAT}\n"


HIDDEN = ("set/.ipynb_checkpoints/a.jsonl", "set/._a.jsonl", "set/.b/.c/d.jsonl")
GLOBS = [
    ("set/**/*.jsonl", ["set/a.jsonl", "set/sub/b.jsonl"]),
    ("set/*.jsonl", ["set/a.jsonl"]),
    ("set/?*.jsonl", ["set/a.jsonl"]),
    ("set/._*.jsonl", ["set/._a.jsonl"]),
    ("set/.*/*.jsonl", ["set/.ipynb_checkpoints/a.jsonl"]),
    ("set/.ipynb_checkpoints/*", ["set/.ipynb_checkpoints/a.jsonl"]),
    ("set/.b/.c/*", ["set/.b/.c/d.jsonl"]),
]


@pytest.mark.parametrize(("pattern", "names"), GLOBS)
def test_glob_matches_hidden_files_only_if_the_pattern_has_their_dot(write, tmp_path, pattern, names):
    for name in ("set/a.jsonl", "set/sub/b.jsonl", *HIDDEN):
        write(name, b"x")
    assert [str(Path(file.path).relative_to(tmp_path)) for file in discover(f"{tmp_path}/{pattern}")] == names


@pytest.mark.parametrize("name", ["set[1]/a.jsonl", "a[0-9]*?.jsonl", "[a].jsonl"])
def test_existing_name_is_not_a_glob(write, name):
    path = write(name, b"x")
    write("a7xy.jsonl", b"x")
    assert [file.path for file in discover(path)] == [path]


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "runs/*/*.jsonl", "*/*/export/*/*.jsonl"])
def test_glob_excludes_the_runs_own_folder(write, tmp_path, pattern):
    other_runs_files = [write("runs/first/a.jsonl", b"x"), write("runs/first/export/jsonl/output.jsonl", b"x")]
    for name in ("a.jsonl", "export/jsonl/output.jsonl", "failed/unit-00000000.0.jsonl"):
        write(f"runs/second/{name}", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for own_folder in (tmp_path / "runs/second", tmp_path / "link/second"):
        files = {Path(file.path).resolve() for file in discover(f"{tmp_path}/{pattern}", exclude=str(own_folder))}
        assert files <= set(map(Path, other_runs_files)), files
        assert files


def test_glob_that_matches_only_the_runs_own_files_is_refused(write, tmp_path):
    write("run/export/jsonl/output.jsonl", b"x")
    with pytest.raises(InputError, match="no such file"):
        discover(f"{tmp_path}/**/*.jsonl", exclude=f"{tmp_path}/run")


@pytest.mark.parametrize("glob", ["", "/*"])
def test_file_name_that_is_not_utf_8_is_refused(tmp_path, glob):
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(b"{}")
    with pytest.raises(InputError, match=r"caf\\xe9\.jsonl': its name is not valid UTF-8"):
        discover(f"{tmp_path}{glob}")


def test_folder_with_only_text_files_is_read(write, tmp_path):
    write("a.txt", b"x")
    write("b.txt.gz", b"y")
    assert names_and_formats(tmp_path) == [("a.txt", "text"), ("b.txt.gz", "text")]


def test_input_format_overrides_suffix(write):
    assert names_and_formats(write("prompts.log.gz", b"x"), "text") == [("prompts.log.gz", "text")]


@pytest.fixture
def put_object(s3):
    """Return a function that writes an object into the bucket."""
    return lambda key, data: s3_client.store().api.put_object(Bucket="bucket", Key=key, Body=data)


def test_fingerprint_is_equal_on_disk_and_s3(put_object, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 9}), path)
    put_object("prompts/a.parquet", path.read_bytes())
    disk_fingerprint, s3_fingerprint = (
        corpus.scan(corpus.find_files(uri), Cut(rows_per_unit=9), None, WorkEstimate())[2]
        for uri in (str(path), "s3://bucket/prompts/a.parquet")
    )
    assert s3_fingerprint == disk_fingerprint


def test_s3_files_folders_and_globs(put_object):
    put_object("prompts/a.jsonl", b'{"prompt": "one"}\n{"prompt": "two"}\n')
    put_object("prompts/b.csv", b"prompt\nthree\n")
    assert [file.path for file in discover("s3://bucket/prompts/")] == [
        "s3://bucket/prompts/a.jsonl",
        "s3://bucket/prompts/b.csv",
    ]
    assert [file.path for file in discover("s3://bucket/prompts/*.csv")] == ["s3://bucket/prompts/b.csv"]
    spans, _, _ = corpus.scan(corpus.find_files("s3://bucket/prompts"), Cut(rows_per_unit=1), None, WorkEstimate())
    assert [row.columns["prompt"] for span in spans for row in corpus.read_span(span)] == ["one", "two", "three"]
    with pytest.raises(InputError, match="no such file"):
        discover("s3://bucket/prompts/c.jsonl")


@pytest.mark.parametrize(("pattern", "names"), GLOBS)
def test_s3_glob_matches_hidden_objects_only_if_the_pattern_has_their_dot(put_object, pattern, names):
    for name in ("set/a.jsonl", "set/sub/b.jsonl", *HIDDEN):
        put_object(f"prompts/{name}", b"x")
    assert [file.path for file in discover(f"s3://bucket/prompts/{pattern}")] == [
        f"s3://bucket/prompts/{name}" for name in names
    ]


def test_ignored_objects_of_an_s3_folder_are_announced(put_object):
    for name in ("set/a.csv", "set/b.json", "set/y=1/c.csv", "set/run/unit.parquet", "set/_temporary/d.csv"):
        put_object(f"prompts/{name}", b"x")
    notes = []
    discover("s3://bucket/prompts/set", exclude="s3://bucket/prompts/set/run", announce=notes.append)
    assert notes == [
        f"input s3://bucket/prompts/set: b.json {UNKNOWN_FORMAT}",
        "input s3://bucket/prompts/set: y=1/ ignored: subfolders need a glob such as 's3://bucket/prompts/set/**/*.parquet'",
    ]


def test_existing_s3_key_is_not_a_glob(put_object):
    for name in ("set[1]/a.jsonl", "set1/a.jsonl", "b*.jsonl", "bc.jsonl"):
        put_object(f"prompts/{name}", b'{"prompt": "x"}')
    for name in ("set[1]/a.jsonl", "b*.jsonl"):
        assert [file.path for file in discover(f"s3://bucket/prompts/{name}")] == [f"s3://bucket/prompts/{name}"]
        assert [row.columns["prompt"] for row in corpus.read_span(_only_span(f"s3://bucket/prompts/{name}"))] == ["x"]
    assert [file.path for file in discover("s3://bucket/prompts/set[1]")] == ["s3://bucket/prompts/set[1]/a.jsonl"]
    assert [file.path for file in discover("s3://bucket/prompts/set[1]/")] == ["s3://bucket/prompts/set[1]/a.jsonl"]


def test_s3_glob_excludes_the_runs_own_folder(put_object):
    for name in ("data/a.jsonl", "data/run/export/jsonl/output.jsonl", "data/run2/b.jsonl"):
        put_object(f"prompts/{name}", b"x")
    files = discover("s3://bucket/prompts/data/**/*.jsonl", exclude="s3://bucket/prompts/data/run")
    assert [file.path for file in files] == [
        "s3://bucket/prompts/data/a.jsonl",
        "s3://bucket/prompts/data/run2/b.jsonl",
    ]


def _only_span(uri):
    (span,), _, _ = corpus.scan(corpus.find_files(uri), Cut(rows_per_unit=9), None, WorkEstimate())
    return span


def _create_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


SPECIAL_FILES = [
    (os.mkfifo, r"a named pipe(.|\n)*prompts\.jsonl"),
    (_create_socket, "a socket"),
    (lambda path: path.symlink_to("/dev/null"), "a device"),
    (lambda path: path.symlink_to("gone.jsonl"), r"a symbolic link to 'gone\.jsonl', which does not exist"),
    (lambda path: path.symlink_to(path.name), "a symbolic link to 'a.jsonl', which does not exist"),
]


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl", ""])
@pytest.mark.parametrize(
    ("create", "message"), SPECIAL_FILES, ids=["pipe", "socket", "device", "broken link", "link to itself"]
)
def test_special_files_are_refused(tmp_path, create, message, pattern):
    create(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"x")
    with pytest.raises(InputError, match=message):
        discover(str(tmp_path / pattern))


def test_process_substitution_is_refused(tmp_path):
    reader, writer = os.pipe()
    try:
        with pytest.raises(InputError, match="a named pipe"):
            discover(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
        os.close(writer)


def test_open_file_descriptor_is_resolved(write):
    path = write("a.jsonl", b"x")
    with Path(path).open() as file:
        assert [file.path for file in discover(f"/dev/fd/{file.fileno()}")] == [path]


@pytest.mark.parametrize("name", ["-", "x" * 300, "\0"])
def test_impossible_file_names_are_refused(name):
    with pytest.raises(InputError, match=r"standard input is not supported|cannot be read|no such file"):
        discover(name)


MARKER_FILES = (
    "_SUCCESS", "_committed_4711", "_started_4711", ".part-0.jsonl.crc", "part-0.jsonl.crc", ".DS_Store",
    "_temporary/0/part-1.jsonl", "_delta_log/0.checkpoint.parquet", "__MACOSX/a.jsonl", "_metadata",
)  # fmt: skip


@pytest.mark.parametrize("pattern", ["out", "out/*", "out/**/*", "out/**/*.*"])
def test_markers_of_other_programs_are_skipped(write, tmp_path, pattern):
    for name in ("part-0.jsonl", "_part-1.jsonl", *MARKER_FILES):
        write(f"out/{name}", b"x")
    assert names_and_formats(tmp_path / pattern) == [("_part-1.jsonl", "jsonl"), ("part-0.jsonl", "jsonl")]


@pytest.mark.parametrize(
    ("folder_objects", "uri"),
    [
        (("data",), "s3://bucket/data"),
        (("data/",), "s3://bucket/data"),
        (("data", "data/", "data/sub/", "data/sub"), "s3://bucket/data/"),
        (("data", "data/", "data_$folder$"), "s3://bucket/data*"),
        (("data/", "data/sub", "data/sub/"), "s3://bucket/data/*"),
        (("data", "data/a.jsonl/"), "s3://bucket/data/**"),
    ],
)
def test_folder_objects_are_skipped(put_object, folder_objects, uri):
    for name in (*folder_objects, "data/_SUCCESS"):
        put_object(name, b"")
    put_object("data/sub/deep/readme", b"x")
    put_object("data/a.jsonl", b"x")
    if uri.endswith("data*"):  # of all objects, the glob matches only data.csv
        put_object("data.csv", b"x")
        assert [file.path for file in discover(uri)] == ["s3://bucket/data.csv"]
    elif "**" in uri:
        with pytest.raises(InputError, match="readme: unknown format"):
            discover(uri)
    else:
        assert [file.path for file in discover(uri)] == ["s3://bucket/data/a.jsonl"]
