from types import SimpleNamespace

import pytest

from peagle.errors import PeagleError, StorageError
from pipelines.batch import cluster
from pipelines.batch.streaming import _observe


@pytest.mark.parametrize("error", [OSError("no such device"), StorageError("503")])
def test_a_driver_that_cannot_look_leaves_ray_alone_until_its_end(monkeypatch, error):
    def observe():
        raise error

    codes = []
    monkeypatch.setattr(cluster, "abandon", codes.append)
    with pytest.raises((OSError, PeagleError)):
        _observe(SimpleNamespace(observe=observe))
    assert codes == [1]
