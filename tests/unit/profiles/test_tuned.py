"""Runs that follow a profile: what is said at their start, when they leave its range, and in their report."""

import pytest

from peagle import hardware
from peagle.profiles.measurements import NONE
from peagle.profiles.profile import MeasuredCell, Profile, Tuned, write_profile
from peagle.profiles.watch import tuned_notes
from peagle.speculation import SpeculationStats
from pipelines.batch.config import GenerateConfig
from pipelines.batch.resolve import resolve

HERE = hardware.detect()


def cell(method, k, concurrency, speed, length=None):
    return MeasuredCell(
        method=method, k=k, concurrency=concurrency, output_tokens_per_s=speed, acceptance_length=length,
        drafter=method, max_num_batched_tokens=2048,
    )  # fmt: skip


CELLS = [cell("peagle", 3, 4, 50.0, 1.6), cell(NONE, 0, 4, 40.0), cell(NONE, 0, 16, 100.0)]


def stats(num_drafts, accepted):
    return SpeculationStats(
        num_drafts=num_drafts, num_draft_tokens=3 * num_drafts, accepted_per_position=(accepted, 0, 0)
    )


@pytest.fixture
def file(tmp_path):
    profile = Profile(
        peagle_profile=1,
        decision="P-EAGLE K=3: 50.0 output tokens/s, 4 at once.",
        objective={},
        engine={"model": "m", "drafter": "peagle", "num_speculative_tokens": 3, "max_num_seqs": 4,
                "max_num_batched_tokens": 2048},
        tuned=Tuned.of(CELLS[0], CELLS),
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
        return resolve(config, HERE, ["prompt"], announce=print)

    return make


def test_a_run_takes_the_sizes_of_its_profile_and_tells_its_decision(resolved):
    run = resolved()
    assert (run.spec.max_num_seqs, run.spec.max_num_batched_tokens) == (4, 2048)
    assert run.tuned.at_start(4)[0] == "profile: P-EAGLE K=3: 50.0 output tokens/s, 4 at once."
    assert not any("at once, and the profile" in note for note in run.tuned.at_start(4))


def test_another_concurrency_is_told_at_the_start(resolved):
    (note,) = [note for note in resolved(max_num_seqs=16).tuned.at_start(16) if "and the profile holds" in note]
    assert note.endswith(
        "Measured at 16 at once: no speculation 100.0 output tokens/s: --drafter none --max-num-seqs 16."
    )


def test_live_acceptance_below_the_range_is_told_once(resolved):
    watch = resolved().tuned
    assert watch.new(num_drafts=100, acceptance_length=1.1) == []
    (note,) = watch.new(num_drafts=1000, acceptance_length=1.1)
    assert "no speculation would be" in note
    assert watch.new(num_drafts=2000, acceptance_length=1.1) == []


def test_another_k_than_the_profiles_is_told_and_its_acceptance_is_not_judged(resolved):
    watch = resolved(num_speculative_tokens=7).tuned
    assert any("the drafter is not the profile's" in note for note in watch.at_start(4))
    assert watch.new(num_drafts=1000, acceptance_length=1.1) == []


def test_other_weights_or_hardware_are_told(resolved, file):
    file.write_text(file.read_text().replace("revision: fake", "revision: other"))
    assert any("weights other, now fake" in note for note in resolved().tuned.at_start(4))


def test_another_head_of_the_same_method_is_told(resolved, file):
    assert not any("head" in note for note in resolved().tuned.at_start(4)), "of this one it was not kept"
    file.write_text(file.read_text().replace("head_fingerprint: null", "head_fingerprint: other", 1))
    assert any("head other, now fake" in note for note in resolved().tuned.at_start(4))
    assert not any("head" in note for note in resolved(num_speculative_tokens=7).tuned.at_start(4))


def test_a_report_says_it_again(resolved):
    kept = resolved().tuned.to_dict(4)
    (note,) = tuned_notes(kept, stats(1000, 100))
    assert "The acceptance length is 1.10" in note
    assert tuned_notes(kept, stats(1000, 600)) == []
    assert len(tuned_notes(resolved().tuned.to_dict(16), stats(1000, 100))) == 2
    assert tuned_notes(None, stats(1000, 100)) == []


def test_a_run_without_a_profile_is_not_watched():
    config = GenerateConfig(input="in.csv", output="o", engine="fake", usd_per_hour=1)
    assert resolve(config, HERE, ["prompt"], announce=print).tuned is None
