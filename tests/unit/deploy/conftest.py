import pytest

from jobs.deploying import read_workload


@pytest.fixture
def workload(tmp_path):
    """Return a function that writes a configuration to team.yaml and returns its workload."""

    def read(text):
        path = tmp_path / "team.yaml"
        path.write_text(text)
        return read_workload(path, None, max_name_length=50)

    return read
