import datetime

import pytest

from peagle.errors import StoppedEarly
from pipelines.batch import request as request_module
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import RunRequest

COMMAND = ["peagle", "generate", "--output", "runs/a", "--retry-failed"]


@pytest.fixture
def make_request(tmp_path):
    def make(**options):
        return RunRequest(config=GenerateConfig(input="in.csv", output=tmp_path, **options), command=COMMAND)

    return make


def test_passed_deadline_stops_the_run(monkeypatch, make_request):
    soon = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=90)
    request = make_request(deadline=f"{soon:%H:%M:%S}", grace_s=1)
    request.require_time()
    monkeypatch.setattr(request_module.time, "time", lambda: soon.timestamp() + 1)
    with pytest.raises(StoppedEarly, match=r"before an engine was running: the deadline .* is near") as error:
        request.require_time()
    assert error.value.hint == "the same command continues the run: peagle generate --output runs/a"


def test_run_with_a_stop_signal_has_no_time_left(make_request):
    request, other = make_request(), make_request()
    request.require_time()
    request.stop.set()
    with pytest.raises(StoppedEarly, match="stopped by a signal"):
        request.require_time()
    other.require_time()


def test_killed_message_has_the_resume_command(make_request):
    assert make_request().killed_message.endswith("the same command continues the run: peagle generate --output runs/a")
