"""`peagle serve` on a cluster where Ray Serve is already running."""

import pytest
from ray import serve

from jobs.serve import _deploy
from peagle.errors import ConfigError
from peagle.ports import free_port
from pipelines.online.config import ServeConfig


@serve.deployment
class OtherApplication:
    """An application of another user."""


@pytest.fixture
def address(ray_cluster):
    """The host and port of Ray Serve on this cluster."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield {"host": "127.0.0.1", "port": port}
    serve.shutdown()


def test_running_endpoint_is_not_replaced(address, tmp_path):
    serve.run(OtherApplication.bind(), name="peagle", route_prefix="/")
    with pytest.raises(ConfigError, match=r"an application `peagle` \(RUNNING\)"):
        _deploy(ServeConfig(state=tmp_path, **address), None, [], is_remote=True)
    assert serve.status().applications["peagle"].status == "RUNNING"


@pytest.mark.parametrize("other", [{"host": "0.0.0.0"}, {"port": 1}])
def test_address_must_be_that_of_the_running_serve(address, tmp_path, other):
    config = ServeConfig(state=tmp_path, **(address | other))
    address_text = f"{address['host']}:{address['port']}"
    with pytest.raises(ConfigError, match=f"listens on {address_text}, not on {config.host}:{config.port}"):
        _deploy(config, None, [], is_remote=True)
    assert serve.status().applications == {}
