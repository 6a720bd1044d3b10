import signal

import pytest

from pipelines.batch.stopping import stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_a_stop_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        signal.raise_signal(number)
        assert stop.is_set()
    assert signal.getsignal(number) is before
