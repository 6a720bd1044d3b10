import pytest

from jobs.deploying import read_workload


@pytest.fixture
def make_workload(tmp_path):
    """Return a function that makes the workload of a configuration, given as YAML."""

    def make(text):
        path = tmp_path / "team.yaml"
        path.write_text(text)
        return read_workload(path, None, max_name_length=50)

    return make
