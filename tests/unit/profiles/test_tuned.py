"""Runs that follow a profile."""

import pytest
from resolved_runs import resolve_run

from peagle import hardware
from peagle.profiles.measurements import NONE
from peagle.profiles.profile import MeasuredCell, Profile, Tuned, write_profile
from pipelines.batch.config import GenerateConfig

HERE = hardware.detect()


def cell(method, k, concurrency, speed, length=None):
    return MeasuredCell(
        method=method, k=k, concurrency=concurrency, output_tokens_per_s=speed, acceptance_length=length,
        drafter=method, max_num_batched_tokens=2048,
    )  # fmt: skip


CELLS = [cell("peagle", 3, 4, 50.0, 1.6), cell(NONE, 0, 4, 40.0), cell(NONE, 0, 16, 100.0)]


@pytest.fixture
def file(tmp_path):
    profile = Profile(
        peagle_profile=1,
        decision="P-EAGLE K=3: 50.0 output tokens/s, 4 at once.",
        objective={},
        engine={"model": "m", "drafter": "peagle", "num_speculative_tokens": 3, "max_num_seqs": 4,
                "max_num_batched_tokens": 2048},
        tuned=Tuned(concurrency=4, acceptance_length=1.6),
        target={"name": "m", "revision": "fake"},
        hardware=HERE.describe(), versions={}, dataset={}, price=None, made_at="", engine_minutes=1.0,
        measurements=CELLS,
    )  # fmt: skip
    write_profile(tmp_path / "p.yaml", profile)
    return tmp_path / "p.yaml"


@pytest.fixture
def resolved(file):
    """A run with the fake engine; the drafter that it pretends to have is named by K alone."""

    def make(**keys):
        values = {"num_speculative_tokens": 3} | keys
        config = GenerateConfig(input="in.csv", output="o", engine="fake", usd_per_hour=1, profile=file, **values)
        return resolve_run(config)

    return make


def notes(run):
    return run.engine.profile_notes(HERE)


def test_a_run_uses_the_profile(resolved):
    run = resolved()
    assert (run.spec.max_num_seqs, run.spec.max_num_batched_tokens) == (4, 2048)
    assert notes(run)[0] == "profile: P-EAGLE K=3: 50.0 output tokens/s, 4 at once."


def test_a_losing_drafter_has_one_warning(resolved):
    watch = resolved().drafter_watch()
    assert watch.needed == pytest.approx(1.28)  # 1.6 x 40 / 50
    assert watch.new(num_drafts=100, acceptance_length=1.1) == []
    (warning,) = watch.new(num_drafts=1000, acceptance_length=1.1)
    assert "--drafter none" in warning
    assert watch.new(num_drafts=2000, acceptance_length=1.1) == []


def test_other_weights_have_a_note(resolved, file):
    file.write_text(file.read_text().replace("revision: fake", "revision: other"))
    assert any("weights other, now fake" in note for note in notes(resolved()))


def test_another_head_has_a_note(resolved, file):
    assert not any("head" in note for note in notes(resolved())), "the profile does not have its fingerprint"
    file.write_text(file.read_text().replace("head_fingerprint: null", "head_fingerprint: other", 1))
    assert any("head other, now fake" in note for note in notes(resolved()))
    assert not any("head" in note for note in notes(resolved(num_speculative_tokens=7)))


def test_profiles_with_ranges_load(resolved, file):
    old = "tuned:\n  concurrency_low: 1\n  concurrency_high: 4\n  acceptance_low: 1.28\n  acceptance_high: 4.0\n"
    file.write_text(file.read_text().replace("tuned:\n", old))
    assert resolved().spec.max_num_seqs == 4
