"""Background endpoints: `peagle serve` processes that outlive the command that started them.

$PEAGLE_HOME/endpoints/NAME/    endpoint.json  serve.yaml  serve.log  state/
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import psutil
import yaml

from peagle.catalog.folders import peagle_home
from peagle.economics.prices import Price
from peagle.errors import ConfigError, EngineError, PeagleError, did_you_mean
from peagle.files import make_folder, write_atomic, write_json
from peagle.ports import free_port, is_free
from pipelines.online.config import ServeConfig
from pipelines.online.idle import engines_usd

if TYPE_CHECKING:
    import openai

Status = Literal["starting", "up", "ended"]
_RECORD, _CONFIG, _LOG, _UP = "endpoint.json", "serve.yaml", "serve.log", "up.json"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that was started in the background. It might have exited since."""

    folder: Path  # contains the record of this endpoint, the configuration and the log
    state: Path  # the `--state` folder
    url: str
    pid: int
    born_at: float  # the creation time of the process; a reused pid has another one
    started_at: float
    stop_s: float  # maximum time until it has stopped
    model: str = ""  # clients request the first model by this name

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder / _LOG

    def client(self, api_key: str = "none") -> "openai.OpenAI":
        """Return an OpenAI client of this endpoint."""
        import openai

        return openai.OpenAI(base_url=self.url, api_key=api_key)

    def process(self) -> psutil.Process | None:
        """Return the endpoint's process, or None if it has exited."""
        try:
            process = psutil.Process(self.pid)
            is_alive = process.create_time() == self.born_at and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if is_alive else None

    def status(self) -> Status:
        if self.process() is None:
            return "ended"
        return "up" if self._price() else "starting"

    def usd(self) -> float | None:
        """Return the cost of the engines in US dollars since the start, or None if the endpoint is not up yet."""
        price = self._price()
        return None if price is None else engines_usd(self.state / "ledger", price, since=self.started_at)

    def _price(self) -> Price | None:
        try:
            up = json.loads((self.state / _UP).read_bytes())
        except FileNotFoundError:
            return None
        return Price.from_dict(up["price"]) if up["up_at"] >= self.started_at else None

    def write(self) -> None:
        record = asdict(self) | {"folder": str(self.folder), "state": str(self.state)}
        write_json(self.folder / _RECORD, record)

    @classmethod
    def read(cls, folder: Path) -> Self:
        try:
            record = json.loads((folder / _RECORD).read_bytes())
            return cls(**{**record, "folder": folder, "state": Path(record["state"])})
        except (ValueError, TypeError, KeyError) as error:
            raise PeagleError(f"{folder / _RECORD} is damaged: {error}", hint="remove it") from error


def record_endpoint_up(state: Path, price: Price) -> None:
    """Record in the state folder that the endpoint is up, and the price of its machine."""
    write_json(state / _UP, {"up_at": time.time(), "price": price.to_dict()})


def endpoints() -> list[Endpoint]:
    return [Endpoint.read(path.parent) for path in sorted(_folder().glob(f"*/{_RECORD}"))]


def find(name: str | None) -> Endpoint:
    """Return the endpoint with this name, or the only running endpoint."""
    all_endpoints = endpoints()
    if name is not None:
        match = next((endpoint for endpoint in all_endpoints if endpoint.name == name), None)
        if match is None:
            names = [endpoint.name for endpoint in all_endpoints]
            hint = did_you_mean(name, names) if names else "peagle up MODEL starts one"
            hint += f"; `peagle deploy sagemaker --down {name}` deletes an endpoint on SageMaker"
            raise ConfigError(f"there is no endpoint {name!r}", hint=hint)
        return match
    running = [endpoint for endpoint in all_endpoints if endpoint.process()]
    if len(running) != 1:
        running_names = ", ".join(endpoint.name for endpoint in running)
        raise ConfigError(
            f"{len(running)} endpoints are running: {running_names}" if running else "no endpoint is running",
            hint="name one of them" if running else "peagle up MODEL starts one",
        )
    return running[0]


def start_and_wait(config: ServeConfig, say: Callable[[str], None]) -> Endpoint:
    """Start an endpoint and wait until it is up. Stop the endpoint if the start fails or is interrupted.

    Raises:
        ConfigError: an endpoint of this name exists.
        EngineError: the endpoint exited; `say` has received its output.
    """
    port = config.port
    if "port" not in config.model_fields_set and not is_free(port, config.host):
        port = free_port(config.host)
    endpoint = start(config, port=port)
    say(f"{endpoint.name} is starting; log: {endpoint.log}")
    try:
        wait_until_up(endpoint, say)
    except BaseException:  # including Ctrl-C: the endpoint would keep running and cost money
        end(endpoint)
        raise
    return endpoint


def start(config: ServeConfig, *, port: int) -> Endpoint:
    folder = _folder() / name_for(config)
    if (folder / _RECORD).exists() and Endpoint.read(folder).process():
        raise ConfigError(
            f"the endpoint {folder.name} already exists",
            hint=f"end it with `peagle down {folder.name}`, or give this one another --name",
        )
    make_folder(folder)
    state = config.state.absolute() if "state" in config.model_fields_set else folder / "state"
    values = config.model_dump(mode="json", exclude_unset=True)
    write_atomic(folder / _CONFIG, yaml.safe_dump(values, sort_keys=False).encode())
    command = [sys.executable, "-m", "jobs.cli", "serve", "--config", str(folder / _CONFIG)]
    started_at = time.time()
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--state", str(state)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    endpoint = Endpoint(
        folder=folder,
        state=state,
        url=config.model_copy(update={"port": port}).url,
        pid=process.pid,
        born_at=psutil.Process(process.pid).create_time(),
        started_at=started_at,
        # Serve waits for `drain_s` again if its controller restarts. Serve and Ray have 60 s to stop.
        stop_s=2 * max(model.drain_s for model in config.served) + 60.0,
        model=config.served[0].served_name,
    )
    endpoint.write()
    return endpoint


def wait_until_up(endpoint: Endpoint, say: Callable[[str], None]) -> None:
    """Wait until the endpoint is up, and pass its output to `say`. Raises EngineError if it exits instead."""
    lines = _new_lines(endpoint.log)
    while (status := endpoint.status()) == "starting":
        for line in next(lines):
            say(line)
        time.sleep(_POLL_S)
    for line in next(lines):
        say(line)
    if status == "ended":
        raise EngineError(f"the endpoint {endpoint.name} did not start", hint=f"see {endpoint.log}")


def end(endpoint: Endpoint) -> None:
    """Stop the endpoint as Ctrl-C would, and wait until it has exited."""
    process = endpoint.process()
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process ended in the meantime
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + endpoint.stop_s
    while endpoint.process():
        if time.monotonic() >= deadline:
            raise EngineError(
                f"the endpoint {endpoint.name} is still running after {endpoint.stop_s:g} s",
                hint=f"`kill {endpoint.pid}` stops it immediately; {endpoint.log} might show why it did not stop",
            )
        time.sleep(_POLL_S)


def name_for(config: ServeConfig) -> str:
    """Return the name of an endpoint: the name of its first model, as a valid folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", config.served[0].served_name).strip("-.") or "endpoint"


def _folder() -> Path:
    return peagle_home() / "endpoints"


def _new_lines(path: Path) -> Iterator[list[str]]:
    """Yield the complete lines that were added to a file since the previous call."""
    with path.open(errors="replace") as file:
        partial_line = ""
        while True:
            *complete_lines, partial_line = (partial_line + file.read()).split("\n")
            yield complete_lines
