"""Fixtures that cost seconds, shared by all tests: a Ray cluster and the embedded target."""

import json
import os

import pytest

# Tests say what they use; what the shell of whoever runs them has set must not change them.
for name in [name for name in os.environ if name.startswith("PEAGLE_") and name != "PEAGLE_HOME"] + ["RAY_ADDRESS"]:
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def ray_cluster():
    """A real local Ray with four logical CPUs, whatever the machine has."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def embedded_target():
    """Folder of the real 135M-parameter target, converted once and kept in PEAGLE_HOME."""
    from peagle.catalog.embedded import ensure_embedded

    return ensure_embedded("smollm2-135m")


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows (or raw lines) as JSON lines; the path."""

    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
