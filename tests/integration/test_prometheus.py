"""A real Prometheus server scrapes an endpoint and a bulk run with real engines.

The test needs Debian's package `prometheus`. With WRITE_DOCS=1, it also draws the dashboard's panels for the docs.
"""

import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

from peagle.humaneval import PROMPT_TEMPLATE, read_humaneval
from peagle.ports import free_port
from tests.chaos.processes import descendants, kill
from tests.integration.panels import draw_svg, rows_of
from tests.unit.test_metrics_files import DASHBOARD, EXPRESSIONS, PROMETHEUS, RULES, names_in

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
START_S, DATA_S = 600, 420  # timeouts: until a command is up, and until all metrics have data
SCRAPE_S = 5
# Compiled, in bf16 and with all drafts verified, because the break-even comes from the catalog's step times, which were
# measured like this.
ENGINE_FLAGS = [
    *("--drafter", "peagle", "--num-speculative-tokens", 3, "--precision", "bf16", "--verify", "all"),
    *("--max-num-seqs", 2, "--max-model-len", 512),
]
PRICE_FLAGS = ["--usd-per-hour", 0.10264]  # the packaged price of a c7a.large, which has two vCPUs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(4 * START_S + DATA_S),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not on the PATH"),
]


@pytest.fixture
def start_command(tmp_path):
    """Return a function that starts a command and waits for a text in its output."""
    processes = []
    lines = (ROOT / "deploy" / "ray.env").read_text().splitlines()
    documented_variables = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    test_variables = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def run(*command, until, **variables):
        log = tmp_path / f"{len(processes)}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **documented_variables, **test_variables, **variables},
                stdout=sink,
                stderr=sink,
            )
        processes.append(process)
        deadline = time.monotonic() + START_S
        while until not in (output := log.read_text(errors="replace")):
            assert process.poll() is None, output[-3000:]
            assert time.monotonic() < deadline, output[-3000:]
            time.sleep(0.2)

    yield run
    for process in reversed(processes):
        kill(*descendants(process.pid), process.pid)  # Ray needs half a minute to stop gracefully
        process.wait()


class PrometheusApi:
    """A client of Prometheus's HTTP API. Errors fail the test."""

    def __init__(self, port):
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)

    def has_number(self, expression):
        series = self._get("query", query=expression)["result"]
        return any(math.isfinite(float(sample["value"][1])) for sample in series)

    def query_range(self, expression, start_time):
        expression = expression.replace("$__rate_interval", "1m").replace("$model", ".*")
        params = {"query": expression, "start": start_time, "end": time.time(), "step": SCRAPE_S}
        return self._get("query_range", **params)["result"]

    def rules(self):
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path, **query_params):
        answer = self._client.get(path, params=query_params).json()
        assert answer["status"] == "success", answer
        return answer["data"]


def test_dashboard_and_alerts_have_data(start_command, tmp_path):
    ray_port, metrics_port = free_port(), free_port()
    start_ray(start_command, ray_port, metrics_port)
    prometheus = start_prometheus(start_command, tmp_path, metrics_port)
    start_time, address = time.time(), f"127.0.0.1:{ray_port}"
    with interactive_clients(*start_endpoint(start_command, tmp_path, address)):
        start_bulk_run(start_command, tmp_path, address)
        wait_for_data(prometheus)
        if os.environ.get("WRITE_DOCS"):
            for title, panels in rows_of(DASHBOARD):
                image = IMAGES / f"metrics-{title.lower().replace(' ', '-')}.svg"
                image.write_text(
                    draw_svg(panels, lambda expression: prometheus.query_range(expression, start_time), start_time)
                )
    assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
    assert len(prometheus.rules()) == len(RULES)


def start_ray(start_command, port, metrics_port):
    start_command(
        Path(sys.executable).parent / "ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=6",
        f"--metrics-export-port={metrics_port}", "--min-worker-port=0", "--max-worker-port=0",
        f"--ray-client-server-port={free_port()}", f"--dashboard-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}",
        "--object-store-memory=100000000", "--disable-usage-stats", until="Ray runtime started.",
    )  # fmt: skip


def start_prometheus(start_command, folder, metrics_port):
    """Start Prometheus with the configuration in the repository, but another port and scrape interval."""
    port, config = free_port(), yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{metrics_port}"]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    start_command(
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", until="ready to receive web requests",
    )  # fmt: skip
    return PrometheusApi(port)


def start_endpoint(start_command, folder, address):
    """Start an endpoint. Return its URL and a key with a budget."""
    port, keys = free_port(), folder / "keys.json"
    peagle = [sys.executable, "-m", "jobs.cli", "serve"]
    add_key = [*peagle, "keys", "add", "alice", "--keys", str(keys), "--budget-usd", "0.05", "--every", "day"]
    key = subprocess.run(add_key, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1]
    url = f"http://127.0.0.1:{port}/v1"
    start_command(
        *peagle, *ENGINE_FLAGS, *PRICE_FLAGS, "--keys", keys, "--port", port, "--state", folder / "state",
        until=url, RAY_ADDRESS=address,
    )  # fmt: skip
    return url, key


def start_bulk_run(start_command, folder, address):
    """Start a run that takes longer than the test. One row in forty is a dead letter."""
    rows = folder / "rows.jsonl"
    prompts = itertools.islice(itertools.cycle(read_humaneval()), 4000)
    rows.write_text(
        "".join(
            json.dumps({"id": str(number), "prompt": None if number % 40 == 39 else question(problem)}) + "\n"
            for number, problem in enumerate(prompts)
        )
    )
    start_command(
        sys.executable, "-m", "jobs.cli", "generate", *ENGINE_FLAGS, *PRICE_FLAGS, "--input", rows,
        "--output", folder / "run", "--rows-per-unit", 4, "--max-tokens", 24, "--engines", 1, "--budget-usd", 1,
        "--deadline", "2h", until="rows", RAY_ADDRESS=address,
    )  # fmt: skip


def question(problem):
    return PROMPT_TEMPLATE.replace("{{ prompt }}", problem["prompt"])


@contextlib.contextmanager
def interactive_clients(url, key):
    """Run two streaming clients until the test ends."""
    stop = threading.Event()

    def send_requests(first_problem):
        body = {"model": "smollm2-135m", "stream": True, "max_tokens": 48, "temperature": 0}
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120) as client:
            for problem in itertools.islice(itertools.cycle(read_humaneval()), first_problem, None):
                if stop.is_set():
                    return
                messages = [{"role": "user", "content": question(problem)}]
                answer = client.post("/chat/completions", json=body | {"messages": messages})
                # Until the first answer determines the token price, a key with a budget may run only one request.
                if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                    time.sleep(float(answer.headers["retry-after"]))
                else:
                    answer.raise_for_status()

    threads = [threading.Thread(target=send_requests, args=(number,)) for number in (0, 40)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def wait_for_data(prometheus):
    """Wait until each query of the dashboard, and each series that an alert uses, has data.

    An alert's own expression has data only while the alert fires; `rules_test.yml` tests these expressions.
    """
    alerts = {f"rule {number}" for number, rule in enumerate(RULES) if "alert" in rule}
    missing = {expression for place, expression in EXPRESSIONS.items() if place not in alerts}
    missing |= {name for place in alerts for name in names_in(EXPRESSIONS[place])}
    deadline = time.monotonic() + DATA_S
    while missing := {expression for expression in missing if not prometheus.has_number(expression)}:
        assert time.monotonic() < deadline, missing
        time.sleep(2)
