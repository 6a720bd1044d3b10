"""Check that code in the folder or weights of a model or head never runs."""

import json
import os
import pickle
import shutil

import pytest

from peagle.catalog.head_files import read_shapes
from peagle.drafter.features import load_reader
from peagle.drafter.target import read_architecture
from peagle.errors import PeagleError
from peagle.requests.tokenizer import load_tokenizer


class _PickleWithCode:
    def __init__(self, marker):
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def marker(tmp_path):
    """The folder that the untrusted code creates if it runs."""
    return tmp_path / "it-ran"


@pytest.fixture
def target_with_code(chat_target, marker, tmp_path):
    """A target with custom code."""
    folder = shutil.copytree(chat_target, tmp_path / "with-code")
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Own: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        names = ("AutoConfig", "AutoModelForCausalLM") if name == "config.json" else ("AutoTokenizer",)
        auto_map = {name: ["own.Own", None] if name == "AutoTokenizer" else "own.Own" for name in names}
        values |= {"auto_map": auto_map, "model_type": "own", "tokenizer_class": "Own", "architectures": ["Own"]}
        (folder / name).write_text(json.dumps(values))
    return folder


@pytest.fixture
def target_with_pickle(chat_target, marker, tmp_path):
    folder = shutil.copytree(chat_target, tmp_path / "with-pickle")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_PickleWithCode(marker)))
    return folder


@pytest.mark.parametrize("read", [load_tokenizer, read_architecture, lambda folder: load_reader(folder, (0, 1), "cpu")])
@pytest.mark.parametrize("fixture", ["target_with_code", "target_with_pickle"])
def test_code_in_a_target_is_not_executed(request, marker, fixture, read):
    folder = request.getfixturevalue(fixture)
    try:
        read(folder)
    except Exception as error:
        message = str(error)
    else:
        message = ""
    assert not marker.exists()
    assert "[y/N]" not in message  # transformers' prompt for permission


def test_pickled_target_weights_are_refused(target_with_pickle, marker):
    with pytest.raises(Exception, match=r"(?i)weights_only|unpickl|unsupported|safetensors"):
        load_reader(target_with_pickle, (0, 1), "cpu")
    assert not marker.exists()


def test_pickled_heads_are_refused(target_with_pickle, marker):
    with pytest.raises(PeagleError, match="safetensors"):
        read_shapes(target_with_pickle)
    assert not marker.exists()
