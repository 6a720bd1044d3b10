"""Fixtures shared by all tests: a Ray cluster, an S3 server, the embedded target, tiny ones, and files to read."""

import functools
import json
import os
import shutil
import signal
import tempfile

import fsspec
import pytest

from peagle.catalog.folders import peagle_home
from peagle.storage import s3_client, storage_path

# Tests say what they use; what the shell of whoever runs them has set must not change them.
for name in [name for name in os.environ if name.startswith("PEAGLE_") and name != "PEAGLE_HOME"] + ["RAY_ADDRESS"]:
    os.environ.pop(name, None)
# Nor must heads that they have added to their catalog. The home of the tests is kept: it has the converted target.
os.environ["PEAGLE_HOME"] = str(peagle_home() / "tests")
# A shell without job control has what it starts in the background ignore Ctrl-C; the commands under test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
_UMASK, _TMPDIR = os.umask(0o077), os.environ.get("TMPDIR")
os.umask(_UMASK)


# Engines of vLLM bind their threads to cores: two at once would compute on the same ones.
_ENGINES = tuple(
    f"integration/test_{name}.py"
    for name in ("draft_parity", "drafted_answers", "generate_vllm", "launch_models", "serve")
)


def pytest_collection_modifyitems(items):
    """What takes longest begins first."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(_ENGINES))


def pytest_xdist_make_scheduler(config, log):
    """A worker takes a whole file, and one of them all files with engines."""
    from xdist.scheduler import LoadFileScheduling

    class EnginesInTurn(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "engines" if file.endswith(_ENGINES) else file

    return EnginesInTurn(config, log)


@pytest.fixture(autouse=True)
def as_it_was():
    """Each test begins with the process as it was: commands set these for good (`peagle/private.py`).

    A command that a module's fixture runs has set them before the first test of that module.
    """
    _set_back()
    yield
    _set_back()


def _set_back():
    os.umask(_UMASK)
    tempfile.tempdir = None  # found anew
    if _TMPDIR is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = _TMPDIR


@pytest.fixture(scope="session")
def ray_cluster():
    """A real local Ray with four logical CPUs, whatever the machine has."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server of this process."""
    from faulty_s3 import FaultyS3

    server = FaultyS3()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The S3 server, which this process and its children are pointed to, without faults and with an empty bucket."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "ENDPOINT_URL": s3_server.url,
        "ACCESS_KEY_ID": "key",
        "SECRET_ACCESS_KEY": "secret",
        "REGION": "us-east-1",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3_client.forget_store()
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # one of a test without credentials would be found there
    s3_server.reset()
    client = s3_client.store().api
    client.create_bucket(Bucket="bucket")
    yield s3_server
    s3_server.reset()
    client.close()


@pytest.fixture
def moving_hub(tmp_path, monkeypatch):
    """A Hugging Face hub of the test's own, and an empty cache."""
    from moving_hub import MovingHub

    return MovingHub(tmp_path / "hub", monkeypatch)


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path):
    """Where a run may lie: a folder on a disk, and one in a store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return storage_path("s3://bucket/some/run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def embedded_target():
    """Folder of the real 135M-parameter target, converted once and kept in PEAGLE_HOME."""
    from peagle.catalog.embedded import ensure_embedded

    return ensure_embedded("smollm2-135m")


@pytest.fixture(scope="session")
def shipped_head():
    """Folder of the P-EAGLE head that ships, with all its weights."""
    from peagle.catalog.shipped_heads import HEADS_FOLDER, whole_head

    return whole_head(HEADS_FOLDER / "smollm2-135m-peagle")


@pytest.fixture(scope="session")
def shipped_eagle3():
    """Folder of the EAGLE-3 head that ships, with all its weights."""
    from peagle.catalog.shipped_heads import HEADS_FOLDER, whole_head

    return whole_head(HEADS_FOLDER / "smollm2-135m-eagle3")


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Folder of a random target of the Llama architecture: 4 layers of 4 heads, hidden size 32, 96 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=95,  # as of its tokenizer, where it has one
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def speaking_target(target, tmp_path_factory):
    """The tiny target with a tokenizer of single characters and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "\n" + "".join(map(chr, range(32, 126)))
    folder = tmp_path_factory.mktemp("speaking") / "tiny"
    shutil.copytree(target, folder)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)} | {"<end>": 95}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def foreign_target(tmp_path_factory, speaking_target):
    """The folder of a target of another architecture, with the tiny target's tokenizer; built on first use."""
    from foreign_targets import save_foreign_target

    @functools.cache
    def built(model_type):
        folder = tmp_path_factory.mktemp("foreign") / model_type
        save_foreign_target(model_type, folder)
        for file in [*speaking_target.glob("*token*"), *speaking_target.glob("*.jinja")]:
            shutil.copy(file, folder)
        return folder

    return built


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows (or raw lines) as JSON lines; the path."""

    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
