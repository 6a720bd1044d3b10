import pytest
from resolved_runs import resolve_run

from peagle import hardware
from peagle.profiles.profile import TunedTarget, write_profile
from pipelines.batch.config import GenerateConfig

HERE = hardware.detect()


@pytest.fixture
def file(profile, tmp_path):
    target = TunedTarget(name="m", revision="fake")
    changes = {"target": target, "hardware": HERE.describe(), "versions": {}, "engine": profile.engine | {"model": "m"}}
    write_profile(tmp_path / "p.yaml", profile.model_copy(update=changes))
    return tmp_path / "p.yaml"


@pytest.fixture
def resolve_with_profile(file):
    """Return a function that resolves a run with the profile and the fake engine."""

    def make(**options):
        values = {"num_speculative_tokens": 3} | options
        config = GenerateConfig(input="in.csv", output="o", engine="fake", usd_per_hour=1, profile=file, **values)
        return resolve_run(config)

    return make


def notes(run):
    return run.engine.profile_notes(HERE)


def test_run_uses_the_profile(resolve_with_profile):
    run = resolve_with_profile()
    assert (run.spec.max_num_seqs, run.spec.max_num_batched_tokens) == (4, 2048)
    assert notes(run)[0] == "profile: P-EAGLE K=3: 50.0 output tokens/s, 4 concurrent requests."


def test_drafter_that_loses_is_reported_once(resolve_with_profile):
    watch = resolve_with_profile(verify="all").drafter_watch()
    # The acceptance length times the speed without the drafter, divided by the speed with it.
    assert watch.break_even_length == pytest.approx(1.6 * 40 / 50)
    assert watch.new_warnings(num_drafts=100, acceptance_length=1.1) == []
    (warning,) = watch.new_warnings(num_drafts=1000, acceptance_length=1.1)
    assert "--drafter none" in warning
    assert watch.new_warnings(num_drafts=2000, acceptance_length=1.1) == []


def test_note_if_the_target_has_other_weights(resolve_with_profile, file):
    file.write_text(file.read_text().replace("revision: fake", "revision: other"))
    assert any("weights other, now fake" in note for note in notes(resolve_with_profile()))


def test_note_if_the_head_is_a_different_one(resolve_with_profile, file):
    assert not any("head" in note for note in notes(resolve_with_profile())), (
        "the profile has no fingerprint of its head"
    )
    file.write_text(file.read_text().replace("head_fingerprint: null", "head_fingerprint: other", 1))
    assert any("head other, now fake" in note for note in notes(resolve_with_profile()))
    assert not any("head" in note for note in notes(resolve_with_profile(num_speculative_tokens=7)))


def test_profile_with_ranges_from_an_earlier_version_is_accepted(resolve_with_profile, file):
    old = "tuned:\n  concurrency_low: 1\n  concurrency_high: 4\n  acceptance_low: 1.28\n  acceptance_high: 4.0\n"
    file.write_text(file.read_text().replace("tuned:\n", old))
    assert resolve_with_profile().spec.max_num_seqs == 4
