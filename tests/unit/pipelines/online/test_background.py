import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import yaml

from peagle.economics.prices import Price
from peagle.errors import ConfigError, EngineError, PeagleError
from pipelines.online import background
from pipelines.online.background import (
    Endpoint,
    end,
    endpoints,
    find,
    name_for,
    record_endpoint_up,
    start,
    wait_until_up,
)
from pipelines.online.config import ServeConfig

PRICE = Price.fixed(usd_per_hour=1, device="vcpu", num_devices=2)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def start_process():
    """Return a function that starts a Python process (default: one that sleeps). The processes end with the test."""
    processes = []

    def start(code="import time; time.sleep(60)", log=subprocess.DEVNULL):
        processes.append(subprocess.Popen([sys.executable, "-c", code], stdout=log))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def write_endpoint(home, process, name="m", stop_s=5.0):
    folder = home / "endpoints" / name
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    born_at = psutil.Process(process.pid).create_time()
    endpoint = Endpoint(
        folder=folder,
        state=folder / "state",
        url="http://127.0.0.1:8000/v1",
        pid=process.pid,
        born_at=born_at,
        started_at=time.time(),
        stop_s=stop_s,
    )
    endpoint.write()
    return endpoint


def test_status_of_an_endpoint(home, start_process):
    process = start_process()
    endpoint = write_endpoint(home, process)
    assert (endpoint.status(), endpoint.usd()) == ("starting", None)
    record_endpoint_up(endpoint.state, PRICE)
    assert (endpoint.status(), endpoint.usd()) == ("up", 0)
    process.kill()  # now a zombie
    while endpoint.process():
        pass
    assert endpoint.status() == "ended"
    process.wait()
    assert endpoint.status() == "ended"
    assert endpoints() == [endpoint]


def test_reused_pid_is_detected(home, start_process):
    endpoint = write_endpoint(home, start_process())
    assert replace(endpoint, born_at=endpoint.born_at - 1).process() is None


def test_up_record_from_before_the_start_is_ignored(home, start_process):
    endpoint = write_endpoint(home, start_process())
    record_endpoint_up(endpoint.state, PRICE)
    assert replace(endpoint, started_at=time.time() + 1).status() == "starting"


def test_end_sends_sigterm_and_waits_until_the_process_ends(home, start_process):
    process = start_process()
    endpoint = write_endpoint(home, process)
    end(endpoint)
    assert process.wait() == -15
    end(endpoint)  # no effect on an endpoint that has ended
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    stubborn = start_process(code, log=subprocess.PIPE)
    stubborn.stdout.read(1)
    with pytest.raises(EngineError, match=r"is still running after 0\.5 s"):
        end(write_endpoint(home, stubborn, name="stubborn", stop_s=0.5))
    stubborn.stdout.close()


def test_output_is_printed_until_the_endpoint_is_up(home, start_process):
    endpoint = write_endpoint(home, start_process())
    endpoint.log.write_text("one\nhal")  # the second line is incomplete
    messages = []

    def announce(line):
        messages.append(line)
        with endpoint.log.open("a") as log:
            log.write("f\n")
        record_endpoint_up(endpoint.state, PRICE)

    wait_until_up(endpoint, announce)
    assert messages[:2] == ["one", "half"]


def test_failed_start_is_an_error(home, start_process):
    process = start_process("")  # ends immediately
    endpoint = write_endpoint(home, process)
    process.wait()
    endpoint.log.write_text("peagle serve: no model 'x' in the catalog\n")
    messages = []
    with pytest.raises(EngineError, match="the endpoint m did not start"):
        wait_until_up(endpoint, messages.append)
    assert messages == ["peagle serve: no model 'x' in the catalog"]


def test_start_runs_peagle_serve(home, monkeypatch, start_process):
    commands = []

    def popen(command, **options):
        commands.append((command, options))
        return start_process()

    fake_subprocess = {"Popen": popen, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    monkeypatch.setattr(background, "subprocess", SimpleNamespace(**fake_subprocess))
    config = ServeConfig(model="org/model", max_num_seqs=2, drain_s=7, engine_args={"block_size": 32})
    endpoint = start(config, port=8123)
    ((command, options),) = commands
    assert endpoint.name == "org-model"
    assert command[1:4] == ["-m", "jobs.cli", "serve"]
    written_config = yaml.safe_load((home / "endpoints" / "org-model" / "serve.yaml").read_text())
    assert ServeConfig(**written_config) == config
    assert command[-4:] == ["--port", "8123", "--state", str(endpoint.state)]
    assert options["start_new_session"]
    assert (endpoint.url, endpoint.stop_s) == ("http://127.0.0.1:8123/v1", 74)  # 2 x drain_s + 60 s
    with pytest.raises(ConfigError, match="org-model already exists"):
        start(config, port=8124)
    assert start(ServeConfig(name="other", state=home / "mine"), port=8124).state == home / "mine"


def test_find_needs_no_name_if_only_one_endpoint_is_running(home, start_process):
    with pytest.raises(ConfigError, match="no endpoint is running"):
        find(None)
    process = start_process()
    record = write_endpoint(home, process, name="one")
    assert find(None) == find("one") == record
    write_endpoint(home, start_process(), name="two")
    with pytest.raises(ConfigError, match="2 endpoints are running: one, two"):
        find(None)
    with pytest.raises(ConfigError, match="there is no endpoint 'tow'") as error:
        find("tow")
    assert "two" in error.value.hint


def test_damaged_record_is_reported(home, start_process):
    endpoint = write_endpoint(home, start_process())
    (endpoint.folder / "endpoint.json").write_text("{}")
    with pytest.raises(PeagleError, match=r"endpoint.json is damaged"):
        endpoints()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "smollm2-135m"),
        ({"name": "a b/../c"}, "a-b-..-c"),
        ({"name": "..."}, "endpoint"),
        ({"name": "ü"}, "endpoint"),
    ],
)
def test_name_is_a_valid_folder_name(options, name):
    assert name_for(ServeConfig(**options)) == name
