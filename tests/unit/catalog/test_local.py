import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_only import write_head, write_target
from moving_hub import FIRST_COMMIT, SECOND_COMMIT
from safetensors.numpy import save_file
from storing import upload

from peagle.catalog import shipped_heads
from peagle.catalog.drafters import resolve_drafter
from peagle.catalog.folders import folder_fingerprint
from peagle.catalog.local import fetched_spec, local_drafter_path, local_model_path, local_spec, tokenizer_of
from peagle.catalog.targets import fetched_model, resolve_model
from peagle.engine.spec import EngineSpec
from peagle.errors import CatalogError

CONFIG = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


def test_a_node_loads_the_commit_of_the_spec(moving_hub):
    for commit in (FIRST_COMMIT, SECOND_COMMIT):
        moving_hub.push("org/model-of-this-test", commit, CONFIG)
    spec = EngineSpec(model="org/model-of-this-test", revision=FIRST_COMMIT)
    assert local_spec(spec) == spec
    assert moving_hub.requests == [("org/model-of-this-test", FIRST_COMMIT)]


def test_a_node_converts_a_target_in_int8_once(target, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    spec = EngineSpec(model=str(target), precision="int8")
    first, second = local_spec(spec), local_spec(spec)
    assert first == second
    assert Path(first.model).parent == tmp_path / "targets"
    assert capfd.readouterr().err.count("converting") == 1
    assert local_spec(EngineSpec(model=str(target), precision="bf16")).model == str(target)


def test_a_shipped_head_is_found_in_this_installation(tmp_path, monkeypatch):
    heads = tmp_path / "here" / "heads"
    (heads / "m-peagle").mkdir(parents=True)
    monkeypatch.setattr(shipped_heads, "HEADS_FOLDER", heads)
    assert local_drafter_path("/elsewhere/peagle/catalog/heads/m-peagle") == str(heads / "m-peagle")


def test_models_missing_on_this_node_are_an_error():
    with pytest.raises(CatalogError, match="does not exist on this node") as caught:
        local_drafter_path("/elsewhere/model")
    assert "every node" in caught.value.hint


def test_a_driver_fetches_no_weights(s3, target, tmp_path):
    upload(target, "models/mine")
    model = resolve_model("s3://bucket/models/mine/")
    assert (model.name, model.path, model.upstream_id) == ("mine", "s3://bucket/models/mine", None)
    assert model.fingerprint == folder_fingerprint(target)
    assert model.config == resolve_model(str(target)).config
    assert model.weights_bytes == (target / "model.safetensors").stat().st_size
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_node_fetches_target_and_head_once(s3, tmp_path, capfd):
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    for folder, name in ((target, "models/mine"), (head, "heads/mine")):
        save_file({"midlayer.weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
        upload(folder, name)
    model = resolve_model("s3://bucket/models/mine")
    drafter = resolve_drafter("s3://bucket/heads/mine", model, 1)
    assert (drafter.name, drafter.fingerprint) == ("mine", folder_fingerprint(head))
    spec = EngineSpec(model=model.path, revision=model.revision, drafter=drafter.spec)
    fetched = fetched_spec(spec)
    assert fetched.drafter is not None
    for path, source in ((fetched.model, target), (fetched.drafter.model, head)):
        assert folder_fingerprint(Path(path)) == folder_fingerprint(source)
    assert (fetched.revision, fetched.drafter.revision, fetched.commits) == (None, None, {})
    assert "fetching s3://bucket/models/mine" in capfd.readouterr().err
    num_requests = len(s3.requests)
    assert fetched_spec(spec) == fetched_spec(fetched) == fetched
    assert len(s3.requests) == num_requests


def test_a_target_replaced_during_a_run_is_an_error(s3, target):
    upload(target, "models/mine")
    model = resolve_model("s3://bucket/models/mine")
    upload(target, "models/mine", **{"config.json": json.dumps({**model.config, "vocab_size": 95}).encode()})
    spec = EngineSpec(model=model.path, revision=model.revision)
    with pytest.raises(CatalogError, match="the files have been replaced since"):
        local_spec(spec)
    assert local_spec(replace(spec, revision=None)).model != model.path


def test_tokenizer_is_loaded_from_a_store_without_weights(s3, chat_target):
    upload(chat_target, "models/mine")
    revision = resolve_model("s3://bucket/models/mine").revision
    try:
        assert tokenizer_of("s3://bucket/models/mine", revision).chat_template
        folder = Path(local_model_path("s3://bucket/models/mine", revision, weights=False))
    finally:
        tokenizer_of.cache_clear()
        local_model_path.cache_clear()
    assert not list(folder.glob("*.safetensors"))


def test_fetched_model_has_the_weights(s3, target):
    upload(target, "models/mine")
    messages = []
    model = fetched_model(resolve_model("s3://bucket/models/mine"), messages.append)
    assert (model.revision, folder_fingerprint(Path(model.path))) == (None, model.fingerprint)
    assert messages
    shutil.rmtree(model.path)
    local = resolve_model(str(target))
    assert fetched_model(local, messages.append) is local
