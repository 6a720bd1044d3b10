"""Fixtures shared by all tests: a Ray cluster, an S3 server, targets, heads and input files."""

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

# Variables of the user's shell must not change tests.
for name in [name for name in os.environ if name.startswith("PEAGLE_") and name != "PEAGLE_HOME"] + ["RAY_ADDRESS"]:
    os.environ.pop(name, None)
# Heads in the user's catalog must not change tests, either. The tests' own PEAGLE_HOME is not deleted afterwards,
# because it caches the converted target.
os.environ["PEAGLE_HOME"] = str(peagle_home() / "tests")
# Shells without job control let background processes ignore Ctrl-C, and commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
_UMASK, _TMPDIR = os.umask(0o077), os.environ.get("TMPDIR")  # the umask can be read only by changing it
os.umask(_UMASK)


# Tests that start vLLM must not run concurrently: vLLM binds its threads to cores, so two engines would share them.
_VLLM_TEST_FILES = tuple(
    f"integration/test_{name}.py"
    for name in ("draft_parity", "drafted_answers", "generate_vllm", "launch_models", "serve")
)


def pytest_collection_modifyitems(items):
    """Run the slowest files first."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(_VLLM_TEST_FILES))


def pytest_xdist_make_scheduler(config, log):
    """Give whole files to workers, and all files that start vLLM to the same worker."""
    from xdist.scheduler import LoadFileScheduling

    class EngineTestsOnOneWorker(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "engines" if file.endswith(_VLLM_TEST_FILES) else file

    return EngineTestsOnOneWorker(config, log)


@pytest.fixture(autouse=True)
def restored_process():
    """Restore the umask and temporary folder, which commands change (`peagle/private.py`).

    They are also restored before a test, because fixtures of a module might have run commands.
    """
    _restore()
    yield
    _restore()


def _restore():
    os.umask(_UMASK)
    tempfile.tempdir = None
    if _TMPDIR is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = _TMPDIR


@pytest.fixture(scope="session")
def ray_cluster():
    """A local Ray cluster with four logical CPUs, independent of the machine."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def s3_server():
    from faulty_s3 import FaultyS3

    server = FaultyS3()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The S3 server, without faults and with an empty bucket. The AWS variables point to it."""
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
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # it might have cached an instance without credentials
    s3_server.reset()
    client = s3_client.store().api
    client.create_bucket(Bucket="bucket")
    yield s3_server
    s3_server.reset()
    client.close()


@pytest.fixture
def moving_hub(tmp_path, monkeypatch):
    """A fake Hugging Face hub whose branches can move to other commits, with an empty cache."""
    from moving_hub import MovingHub

    return MovingHub(tmp_path / "hub", monkeypatch)


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path):
    """The folder of a run; each test runs with it on disk and on S3."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return storage_path("s3://bucket/some/run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def embedded_target():
    """Folder of the real 135M-parameter target, which is converted once and cached in PEAGLE_HOME."""
    from peagle.catalog.embedded import ensure_embedded

    return ensure_embedded("smollm2-135m")


@pytest.fixture(scope="session")
def shipped_head():
    """Folder of the shipped P-EAGLE head, with all its weights."""
    from peagle.catalog.shipped_heads import HEADS_FOLDER, complete_head

    return complete_head(HEADS_FOLDER / "smollm2-135m-peagle")


@pytest.fixture(scope="session")
def shipped_eagle3():
    """Folder of the shipped EAGLE-3 head, with all its weights."""
    from peagle.catalog.shipped_heads import HEADS_FOLDER, complete_head

    return complete_head(HEADS_FOLDER / "smollm2-135m-eagle3")


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Folder of a tiny random Llama target: 4 layers with 4 attention heads, hidden size 32, 96 tokens."""
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
        head_dim=32,  # the smallest for vLLM's CPU attention
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=95,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_target(target, tmp_path_factory):
    """The tiny target with a single-character tokenizer and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "\n" + "".join(map(chr, range(32, 126)))
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(target, folder)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)} | {"<end>": 95}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def foreign_target(tmp_path_factory, chat_target):
    """Return a function that builds a target of another architecture, with the tiny target's tokenizer."""
    from foreign_targets import save_foreign_target

    @functools.cache
    def build(model_type):
        folder = tmp_path_factory.mktemp("foreign") / model_type
        save_foreign_target(model_type, folder)
        for file in [*chat_target.glob("*token*"), *chat_target.glob("*.jinja")]:
            shutil.copy(file, folder)
        return folder

    return build


@pytest.fixture
def write_jsonl(tmp_path):
    """Return a function that writes rows (or raw lines) as JSON lines and returns the path."""

    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
