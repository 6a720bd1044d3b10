"""Fixtures: one browser for all tests of a worker, and a tab and fake endpoints for each test."""

import pytest

from tests.browser.chromium import NAMES, Chromium, executable
from tests.browser.fake_endpoint import FakeEndpoint


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if executable() is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium):
    tab = chromium.page()
    tab.set_screen()
    yield tab
    tab.close()


@pytest.fixture
def serve(tmp_path):
    """Return a function that starts a `FakeEndpoint`."""
    endpoints = []

    def start(**kwargs):
        endpoints.append(FakeEndpoint(tmp_path / f"endpoint-{len(endpoints)}", **kwargs))
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        endpoint.close()
