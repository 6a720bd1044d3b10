"""`peagle serve`: the endpoint on this machine or on the cluster of RAY_ADDRESS."""

import argparse
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import flags
from jobs.output import DRY_RUN_HELP, print_forecast
from peagle.economics.price_options import PRICE_OPTIONS, resolve_price
from peagle.engine.sagemaker import variable_of
from peagle.engine_options import MODEL_KEYS, SIZE_KEYS
from peagle.errors import ConfigError
from peagle.quiet import QuietStderr
from pipelines.online import sagemaker
from pipelines.online.config import ServeConfig

if TYPE_CHECKING:
    from peagle.economics.usage import EngineSession
    from pipelines.online.app import Served

HELP = """\
Serve models through OpenAI's API: keys, limits, usage and cost by key, engines that follow the load.

  peagle serve
  peagle serve --model smollm2-135m --drafter none --max-replicas 2 --port 8001
  peagle serve keys add alice --keys keys.json --requests-per-min 60
  peagle serve --config serve.yaml --host 0.0.0.0 --keys keys.json --batches runs/batches
  peagle serve --config examples/serve.yaml --dry-run
  peagle serve --host 0.0.0.0 --keys keys.json --tls-cert fullchain.pem --tls-key privkey.pem

Without --keys (or PEAGLE_API_KEYS, NAME=KEY separated by commas) only this machine can use it. Several models are
listed in the YAML under `models`. RAY_ADDRESS names the cluster to run on. It must require a token, unless
RAY_AUTH_MODE=disabled says otherwise. Without RAY_ADDRESS a cluster is started on this machine. Ctrl-C or SIGTERM stop
the endpoint: new requests are refused, those under way get --drain-s; a second one stops it at once.
`serve deploy deploy/serve.yaml` runs the same without this command. PEAGLE_SAGEMAKER=true keeps SageMaker's contract
for containers and reads SM_VLLM_* variables: docs/deploy.md.
"""
EPILOG = """\
each key may also be set in the YAML of --config, or in the environment as PEAGLE_<KEY>
exit codes: 0 stopped as asked, 1 error, 2 bad usage or configuration, 3 stopped immediately
"""
APP_NAME = "peagle"
_IF_LOST = (
    "Requests in progress are lost; keys, usage, files and batches are saved, and batches continue. It is safe to "
    "start the same command again"
)
_FAILED = "DEPLOY_FAILED"
_POLL_S = 0.5
_AT_ONCE = "stopped immediately: running requests are lost"
# Beside what requests get: Serve looks now and then, and kills what does not end by itself.
_SPARE_S = 30.0
_GROUPS = {
    "target and drafter": ["name", *MODEL_KEYS, "tool_call_parser", "reasoning_parser"],
    "engines": [
        *SIZE_KEYS,
        "min_replicas",
        "max_replicas",
        "target_ongoing_requests",
        "upscale_delay_s",
        "downscale_delay_s",
        "max_queued_requests",
        "stream_interval_ms",
        "stream_pieces_per_s",
        "drain_s",
        "heartbeat_s",
        "idle_timeout",
        "engine",
    ],
    "access": [
        "host",
        "port",
        "tls_cert",
        "tls_key",
        "metrics_port",
        "keys",
        "max_body_kib",
        "body_timeout_s",
        "request_timeout_s",
        "max_output_tokens",
        "max_choices",
        "max_answer_mib",
        "max_grammar_s",
        "limit_mm_per_prompt",
        "allowed_media_domains",
        "state",
        "log_prompts",
        "share_prefix_cache",
    ],
    "files and batches": [
        "batches",
        "batches_at_once",
        "batch_engines",
        "max_file_mib",
        "max_stored_mib",
        "max_stored_files",
        "max_unfinished_batches",
        "max_transfers_mib",
        "max_transfers_mib_per_key",
        "presigned_downloads",
    ],
    "money": [*PRICE_OPTIONS, "tags"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle serve`."""
    flags.add_flags(parser, sagemaker.config_class(os.environ), _GROUPS, yaml_only=["models"], hidden=["fake"])
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Serve until stopped."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # else what vLLM says when it is imported is shown
    if note := sagemaker.ignored_variables(os.environ):
        print(note, flush=True)
    with QuietStderr():  # vLLM, whose parser reads them, logs what it is missing
        variables = sagemaker.variables(os.environ)
    config = flags.load(sagemaker.config_class(os.environ), args, variables, partial(variable_of, os.environ))
    if args.dry_run:
        return dry_run(config)
    from peagle import hardware
    from peagle.machine import identified
    from peagle.ports import require_free
    from peagle.signals import stop_on_signal
    from pipelines.cluster import ray as cluster
    from pipelines.cluster.inspection import inspect
    from pipelines.cluster.startable import require_startable
    from pipelines.online.app import endpoint_price, gate_settings, prepare_batches, resolve
    from pipelines.online.background import record_up
    from pipelines.online.idle import ended_when_idle
    from pipelines.online.serve import proxy
    from pipelines.online.serve.proxy import require_certificate

    if config.tls_cert and config.tls_key:
        require_certificate(config.tls_cert, config.tls_key)
    with QuietStderr() as quiet:
        here = identified(hardware.detect())
        is_remote = cluster.is_remote()
        if not is_remote:
            require_startable()
        prepare_batches(config)
        served = [] if is_remote else resolve(config, here, num_nodes=1, announce=print)
        gate = gate_settings(config, here, served)  # it and the price refuse before anything starts
        if not is_remote:
            endpoint_price(config, here, served)
            require_free("port", config.port, config.host, hint="choose another port, or stop what listens there")
        if gate.prompts:
            print(f"prompts are written to {gate.prompts}", flush=True)
        logs = config.state / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"state {config.state}: cannot be written: {error}", hint="name another --state"
            ) from error
        quiet.move_to(logs / "serve.log")
        os.environ |= proxy.ENVIRONMENT | os.environ  # for a Ray that is started here
        with cluster.ray_cluster(metrics_port=config.metrics_port, if_lost=_IF_LOST):
            if is_remote:
                here = inspect()
                served = resolve(config, here, num_nodes=cluster.num_nodes(here), announce=print)
            price = endpoint_price(config, here, served)
            _deploy(config, here, served, is_remote=is_remote)
            stopped = threading.Event()
            record_up(config.state, price)
            # After Ray, which takes SIGTERM for itself when it starts.
            with (
                stop_on_signal(stopped, last_words=_AT_ONCE),
                ended_when_idle(config, price, stopped, partial(print, flush=True)),
            ):
                if not is_remote:
                    print(f"metrics: http://127.0.0.1:{cluster.metrics_port()}/metrics")
                print(config.url, flush=True)
                _wait(config, here, served, stopped)
                print("stopping: running requests may finish; repeat to stop immediately", flush=True)
                _shutdown(config, is_remote=is_remote, is_up=True)
    return 0, {"models": [one.keys.served_name for one in served]}


def dry_run(config: ServeConfig) -> tuple[int, dict[str, Any]]:
    """Say what the endpoint would be, and start nothing."""
    from pipelines.online.forecast import forecast

    return print_forecast(forecast(config, print))


def _deploy(config: ServeConfig, here: Any, served: "list[Served]", *, is_remote: bool) -> None:
    """Start the application and wait for its engines; on a failure take it back.

    Raises:
        ConfigError: the cluster has an endpoint already, or its Serve listens elsewhere.
        EngineError: one of them does not start; it says why where its log does.
    """
    from ray import serve

    from pipelines.online.app import bind

    _require_no_other()
    for one in served:
        print(one.describe(), flush=True)
    serve.start(http_options=_http_options(config), logging_config={"enable_access_log": False})
    _require_address(config)
    application = bind(config, here, served)
    try:
        _start(application, config.state)
    except BaseException:  # Ctrl-C too: a cluster would keep it
        _shutdown(config, is_remote=is_remote, is_up=False)
        raise


def _require_no_other() -> None:
    """Refuse to replace another application.

    Serve replaces an application of the same name, so ours would end the other one.
    """
    from ray import serve

    there = serve.status().applications.get(APP_NAME)
    if there is not None and there.status != _FAILED:
        raise ConfigError(
            f"this cluster's Serve has an application `{APP_NAME}` already ({there.status.value})",
            hint="stop its `peagle serve`; if that is no longer running, delete it with:\n"
            f"  python -c \"from ray import serve; serve.delete('{APP_NAME}')\"",
        )


def _http_options(config: ServeConfig) -> dict[str, Any]:
    """The HTTP options as Serve takes them.

    The files must exist under these names wherever its proxy runs.
    """
    files = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
    return {
        "host": config.host,
        "port": config.port,
        **{name: str(path.absolute()) for name, path in files.items() if path is not None},
    }


def _require_address(config: ServeConfig) -> None:
    """Require the address that a running Serve has.

    Serve keeps its address and certificate, and only warns of others that it is told.
    """
    from pipelines.online.serve.ray_names import running_http_options

    there = running_http_options()
    files = {"ssl_certfile": there.ssl_certfile, "ssl_keyfile": there.ssl_keyfile}
    wanted = _http_options(config)
    if any(path != wanted.get(name) for name, path in files.items()):
        how = f"by the certificate {there.ssl_certfile}" if there.ssl_certfile else "without TLS"
        raise ConfigError(
            f"Serve runs on this cluster already, and answers {how}",
            hint="say the same by --tls-cert and --tls-key, or end that Serve with all its applications: "
            "`serve shutdown`",
        )
    if (there.host, there.port) != (config.host, config.port):
        raise ConfigError(
            f"Serve runs on this cluster already, and listens on {there.host}:{there.port}, "
            f"not on {config.host}:{config.port}",
            hint=f"say --host {there.host} --port {there.port}, or end that Serve with all its applications: "
            "`serve shutdown`",
        )


def _start(application: Any, state: Path) -> None:
    from ray import serve

    from peagle.economics.ledger import read_sessions
    from peagle.economics.usage import start_warnings
    from peagle.engine.self_check import require_none_failed
    from peagle.engine.startup import as_told
    from peagle.engine.vllm_internals import with_root_cause
    from peagle.errors import EngineError

    ledger, logs = state / "ledger", state / "logs"
    before, earlier = set(logs.glob("engine-*.log")), {session.session_id for session in read_sessions(ledger)}

    def started() -> "list[EngineSession]":
        return [session for session in read_sessions(ledger) if session.session_id not in earlier]

    try:
        serve.run(application, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:  # Serve gave up on starting it
        require_none_failed(session.self_check for session in started())
        new = sorted(set(logs.glob("engine-*.log")) - before)
        text = "\n".join(log.read_text(errors="replace") for log in new)
        raise with_root_cause(EngineError(f"the endpoint did not start: {error}"), text) from error
    for warning in start_warnings(started()):
        print(as_told(warning), flush=True)


def _wait(config: ServeConfig, here: Any, served: "list[Served]", stopped: threading.Event) -> None:
    """Wait until the endpoint is to stop, and warn of drafters that cost more than they save."""
    from pipelines.online.cost import CostView
    from pipelines.online.live import watch_engines
    from pipelines.online.serve.process_watch import watch_processes

    watch_processes(stopped, partial(print, flush=True))
    watches = {}
    for one in served:
        name = one.keys.served_name
        for note in one.engine.profile_notes(here):
            print(f"{name}: {note}", flush=True)
        if (watch := one.engine.drafter_watch(here)) is not None:
            watches[name] = watch
    if watches:
        view = CostView(config.state / "ledger", resolve_price(config, here))
        watch_engines(watches, view, stopped, print)
    stopped.wait()


def _shutdown(config: ServeConfig, *, is_remote: bool, is_up: bool) -> None:
    """End the application; on a cluster that others use, nothing else."""
    from ray import serve

    if is_up or is_remote:
        _take_back(config)
    if not is_remote:
        serve.shutdown()  # it kills the proxies at once, and with them every connection


def _take_back(config: ServeConfig) -> None:
    """Delete the application and wait until it is gone.

    Serve lets its requests end, and kills it after `drain_s`.

    Where Serve's controller dies meanwhile, the next one begins with the time anew: so it may pass twice.
    """
    from ray import serve

    from pipelines.online.serve.ray_names import begin_deletion

    limit_s = 2 * max(one.drain_s for one in config.served) + _SPARE_S
    give_up_at = time.monotonic() + limit_s
    begin_deletion(APP_NAME)
    while APP_NAME in serve.status().applications:
        if time.monotonic() >= give_up_at:
            print(f"the application is still there after {limit_s:g} s: Serve's log says why", flush=True)
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    from jobs.cli import main

    main(["serve", *sys.argv[1:]])
