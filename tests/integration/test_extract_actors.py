"""Ray Data actors extract the same features from the tiny target as a single process."""

import json

import pytest

from peagle.drafter import features
from peagle.drafter.data import Sample
from peagle.drafter.features import (
    FeatureJob,
    FeatureSpec,
    FeatureStore,
    extract_here,
    samples_fingerprint,
    target_fingerprint,
)
from peagle.errors import CapacityError
from pipelines.training.distributed import extract_on_actors

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def job(target, monkeypatch):
    monkeypatch.setattr(features.plan_shards, "__defaults__", (60,))
    samples = [
        Sample(id=str(n), token_ids=tuple((7 * n + i) % 96 for i in range(9 + n % 5)), num_prompt_tokens=3)
        for n in range(30)
    ]
    spec = FeatureSpec(
        target=target_fingerprint(target), aux_layers=(1, 2), hidden_size=32, samples=samples_fingerprint(samples)
    )

    def make(folder):
        return FeatureJob(target=target, samples=samples, spec=spec, folder=folder, device="cpu")

    return make


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.soak
def test_two_actors_write_the_same_shards_as_one_process(job, target, tmp_path):
    extract_here(job(tmp_path / "one-process"), lambda done, total: None)
    progress = []
    job_for_actors = job(tmp_path / "actors")

    def record_progress(*done_and_total):
        progress.append(done_and_total)

    def extract():
        extract_on_actors(job_for_actors, record_progress, reference=str(target), workers=2, device="cpu")

    extract()
    expected = contents(tmp_path / "one-process")
    assert len(expected) > 5
    assert contents(tmp_path / "actors") == expected
    assert progress == [(done, len(expected) - 1) for done in range(1, len(expected))]
    assert len(FeatureStore(tmp_path / "actors", verify=True)) == 30

    index = json.loads((tmp_path / "actors" / "index.json").read_text())
    del index["shards"]["shard-00002.safetensors"]  # as if killed before the rename
    (tmp_path / "actors" / "index.json").write_text(json.dumps(index))
    (tmp_path / "actors" / "shard-00002.0123.partial").write_bytes(b"cut off")
    mtime_ns = (tmp_path / "actors" / "shard-00001.safetensors").stat().st_mtime_ns
    extract()
    assert contents(tmp_path / "actors") == expected
    assert len(progress) == len(expected)
    assert (tmp_path / "actors" / "shard-00001.safetensors").stat().st_mtime_ns == mtime_ns


def test_too_many_actors_are_refused(job, target, tmp_path):
    with pytest.raises(CapacityError, match="5 workers need a CPU each; the cluster has 4"):
        extract_on_actors(job(tmp_path), lambda done, total: None, reference=str(target), workers=5, device="cpu")
