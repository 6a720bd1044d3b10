import signal

import pytest

from peagle.errors import CapacityError, EngineError
from pipelines.batch.run import _explain, _stop_on_signal


class RayTaskError(Exception):
    cause: BaseException | None = None


def test_our_own_error_is_found_below_rays():
    outer = RayTaskError("boom")
    outer.cause = CapacityError("too big", hint="smaller")
    assert _explain(outer) is outer.cause


def test_our_own_error_is_found_in_the_text_of_a_traceback():
    text = "Traceback ...\npeagle.errors.EngineError: the vLLM engine process died\n\nThe above exception ..."
    found = _explain(RayTaskError(text))
    assert isinstance(found, EngineError)
    assert found.message == "the vLLM engine process died"
    assert "logs/" in found.hint


def test_another_error_keeps_its_last_line():
    assert _explain(RayTaskError("Traceback\nOSError: disk full")).message.endswith("OSError: disk full")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_a_stop_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with _stop_on_signal() as stop:
        signal.raise_signal(number)
        assert stop.is_set()
    assert signal.getsignal(number) is before
