import pytest
import yaml

from peagle.engine_options import EngineOptions
from peagle.errors import ConfigError
from peagle.profiles.profile import read_profile, write_profile


@pytest.fixture
def profile_file(profile, tmp_path):
    write_profile(tmp_path / "p.yaml", profile)
    return tmp_path / "p.yaml"


@pytest.fixture
def change_profile(profile_file):
    def change(edit):
        data = yaml.safe_load(profile_file.read_text())
        edit(data)
        profile_file.write_text(yaml.safe_dump(data))
        return profile_file

    return change


def test_profile_round_trip(profile_file, profile):
    assert read_profile(profile_file) == profile
    first_lines = "# P-EAGLE K=3: 50.0 output tokens/s, 4 concurrent requests.\n# peagle generate"
    assert profile_file.read_text().startswith(first_lines)
    assert profile.chosen == profile.measurements[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("max_num_seqs: 4", "not a profile: peagle_profile is missing"),
        ("- a", "peagle_profile is missing"),
    ],
)
def test_file_that_is_not_a_profile_is_refused(text, message, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_profile(tmp_path / "x.yaml")
    assert "peagle tune" in error.value.hint


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(peagle_profile=2), "peagle_profile: Input should be 1"),
        (lambda d: d.pop("tuned"), "tuned: Field required"),
        (lambda d: d["engine"].update(max_seqs=3), "engine has the unknown key 'max_seqs' .*max_num_seqs"),
        (lambda d: d["engine"].pop("drafter"), "engine must have drafter"),
        (lambda d: d["engine"].update(num_speculative_tokens=9), "no measurement of the chosen engine"),
        (lambda d: d.update(measurements=[]), "measurements"),
        (lambda d: d["measurements"][0].update(k=0), "k must be 0 with method none"),
        (lambda d: d.update(mine=1), "mine: Extra inputs"),
    ],
)
def test_invalid_profiles_are_refused(edit, message, change_profile):
    with pytest.raises(ConfigError, match=message):
        read_profile(change_profile(edit))


def test_profile_sets_options_that_are_not_given(profile_file):
    options = EngineOptions(profile=profile_file, max_model_len=512)
    assert (options.drafter, options.num_speculative_tokens, options.max_num_seqs) == ("peagle", 3, 4)
    assert (options.max_num_batched_tokens, options.max_model_len) == (2048, 512)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drafter": "none"}, {"drafter": "none", "num_speculative_tokens": None, "max_num_seqs": 4}),
        ({"num_speculative_tokens": 7}, {"drafter": "auto", "num_speculative_tokens": 7}),
        ({"max_num_seqs": 64}, {"max_num_batched_tokens": None, "num_speculative_tokens": 3}),
    ],
)
def test_given_option_also_replaces_related_options_of_the_profile(options, expected, profile_file):
    resolved = EngineOptions(profile=profile_file, **options)
    assert {name: getattr(resolved, name) for name in expected} == expected


def test_profile_of_another_target_is_refused(profile_file):
    with pytest.raises(ConfigError, match=r"p.yaml is for smollm2-135m, but the model is gpt-oss-20b") as error:
        EngineOptions(profile=profile_file, model="gpt-oss-20b")
    assert "peagle tune --model gpt-oss-20b" in error.value.hint


def test_target_folder_can_be_given_by_relative_path(change_profile, tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    profile_file = change_profile(lambda data: data["engine"].update(model=str(tmp_path / "target")))
    assert EngineOptions(profile=profile_file, model="target").model == "target"
    with pytest.raises(ConfigError, match="but the model is elsewhere"):
        EngineOptions(profile=profile_file, model="elsewhere")
