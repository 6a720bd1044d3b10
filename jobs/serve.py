"""`peagle serve`: run the endpoint on this machine or on the cluster of RAY_ADDRESS."""

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
from peagle.plain_json import to_json
from peagle.quiet import QuietStderr
from pipelines.online import sagemaker
from pipelines.online.config import ServeConfig

if TYPE_CHECKING:
    from peagle.economics.usage import EngineSession
    from pipelines.online.app import EndpointModel

HELP = """\
Serve models through OpenAI's API, with keys, limits, usage and cost by key, and autoscaling.

  peagle serve
  peagle serve --model qwen3-coder-30b-a3b-instruct --max-replicas 2 --port 8001
  peagle serve --config serve.yaml --host 0.0.0.0 --keys keys.json --batches runs/batches
  peagle serve --config examples/serve.yaml --dry-run
  peagle serve --host 0.0.0.0 --keys keys.json --tls-cert fullchain.pem --tls-key privkey.pem

Without --keys (or PEAGLE_API_KEYS, NAME=KEY separated by commas) only this machine can use the endpoint. To serve
several models, list them in the YAML under `models`. RAY_ADDRESS selects the cluster. It must require a token, unless
RAY_AUTH_MODE=disabled is set. Without RAY_ADDRESS a cluster is started on this machine. Ctrl-C or SIGTERM stop the
endpoint: new requests are refused, running requests get --drain-s to finish. A second signal stops it immediately.
`serve deploy deploy/serve.yaml` runs the same endpoint without this command. With PEAGLE_SAGEMAKER=true the endpoint
follows SageMaker's contract for containers and reads SM_VLLM_* variables: docs/deploy.md.
"""
EPILOG = """\
each key may also be set in the YAML of --config, or in the environment as PEAGLE_<KEY>
exit codes: 0 stopped by a signal, 1 error, 2 bad usage or configuration, 3 stopped immediately
"""
APP_NAME = "peagle"
_IF_RAY_DIES = (
    "Requests in progress are lost; keys, usage, files and batches are saved, and batches continue. It is safe to "
    "start the same command again"
)
_POLL_S = 0.5
_SECOND_SIGNAL_MESSAGE = "stopped immediately: running requests are lost"
_DELETE_MARGIN_S = 30.0  # added to the drain time, for Serve's polling and for processes that Serve must kill
_GROUPS = {
    "model": ["name", *MODEL_KEYS, "tool_call_parser", "reasoning_parser"],
    "engines": [
        *SIZE_KEYS, "min_replicas", "max_replicas", "target_ongoing_requests", "upscale_delay_s", "downscale_delay_s",
        "max_queued_requests", "stream_interval_ms", "stream_pieces_per_s", "drain_s", "heartbeat_s", "idle_timeout",
        "engine",
    ],
    "access": [
        "host", "port", "tls_cert", "tls_key", "metrics_port", "keys", "max_body_kib", "body_timeout_s",
        "request_timeout_s", "max_output_tokens", "max_choices", "max_answer_mib", "max_grammar_s",
        "limit_mm_per_prompt", "allowed_media_domains", "state", "log_prompts", "share_prefix_cache",
    ],
    "batches": [
        "batches", "batches_at_once", "batch_engines", "max_file_mib", "max_stored_mib", "max_stored_files",
        "max_unfinished_batches", "max_transfers_mib", "max_transfers_mib_per_key", "presigned_downloads",
    ],
    "money": [*PRICE_OPTIONS, "tags"],
}  # fmt: skip
COMMON = (
    "model", "drafter", "host", "port", "keys", "max_replicas", "max_num_seqs", "batches", "idle_timeout", "state",
    "config", "dry_run",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, sagemaker.config_class(os.environ), _GROUPS, yaml_only=["models"], hidden=["fake"])
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Serve until a signal or the idle timeout."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # vLLM logs to standard output when imported
    if note := sagemaker.ignored_variables(os.environ):
        print(note, flush=True)
    with QuietStderr():  # vLLM's argument parser logs missing packages
        variables = sagemaker.config_from_env(os.environ)
    config = flags.load(sagemaker.config_class(os.environ), args, variables, partial(variable_of, os.environ))
    if args.dry_run:
        return dry_run(config)
    from peagle.hardware import detect_machine
    from peagle.ports import require_free
    from peagle.signals import stop_on_signal
    from pipelines.cluster import ray as cluster
    from pipelines.cluster.inspection import inspect
    from pipelines.cluster.startable import require_startable
    from pipelines.online.app import endpoint_price, gate_settings, prepare_batches, resolve
    from pipelines.online.background import record_endpoint_up
    from pipelines.online.idle import stop_when_idle
    from pipelines.online.serve import proxy
    from pipelines.online.serve.proxy import require_certificate

    if config.tls_cert and config.tls_key:
        require_certificate(config.tls_cert, config.tls_key)
    with QuietStderr() as quiet:
        hardware, is_remote = detect_machine(), cluster.is_remote()
        if not is_remote:
            require_startable()
        prepare_batches(config)
        served = [] if is_remote else resolve(config, hardware, num_nodes=1, announce=print)
        gate = gate_settings(config, hardware, served)  # refuses invalid options before Ray starts
        if not is_remote:
            endpoint_price(config, hardware, served)
            require_free("port", config.port, config.host, hint="choose another port, or stop the program that uses it")
        if gate.prompts:
            print(f"prompts are written to {gate.prompts}", flush=True)
        logs = config.state / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"state {config.state}: cannot be written: {error}", hint="use another folder for --state"
            ) from error
        quiet.move_to(logs / "serve.log")
        os.environ |= proxy.ENVIRONMENT | os.environ  # defaults for a Ray cluster that is started here
        # `bind` needs the preloaded module, and importing it takes about as long as starting Ray.
        with cluster.ray_cluster(metrics_port=config.metrics_port, if_lost=_IF_RAY_DIES, preload="ray.serve.llm"):
            if is_remote:
                hardware = inspect()
                served = resolve(config, hardware, num_nodes=cluster.num_nodes(hardware), announce=print)
            price = endpoint_price(config, hardware, served)
            _deploy(config, hardware, served, is_remote=is_remote)
            stopped = threading.Event()
            record_endpoint_up(config.state, price)
            # Ray replaces the SIGTERM handler when it starts, so peagle's handler is installed afterwards.
            with (
                stop_on_signal(stopped, message=_SECOND_SIGNAL_MESSAGE),
                stop_when_idle(config, price, stopped, partial(print, flush=True)),
            ):
                print(_banner(config, None if is_remote else cluster.metrics_port()))
                print(config.url, flush=True)
                _wait_until_stopped(config, hardware, served, stopped)
                print("stopping: waiting for running requests; repeat to stop immediately", flush=True)
                _shutdown(config, is_remote=is_remote, is_up=True)
    return 0, {"models": [model.options.served_name for model in served]}


def _banner(config: ServeConfig, metrics_port: int | None) -> str:
    """Return how to use the endpoint: addresses, a request in curl and in Python, and who may use it."""
    url = config.url.replace("//0.0.0.0:", "//127.0.0.1:")
    body = {"model": config.served[0].served_name, "messages": [{"role": "user", "content": "Hello!"}]}
    requires_key = config.keys is not None or bool(os.environ.get("PEAGLE_API_KEYS"))
    curl_header = ' -H "Authorization: Bearer $API_KEY"' if requires_key else ""
    api_key = 'os.environ["API_KEY"]' if requires_key else '"none"'
    access = (
        "every request needs an API key: peagle serve keys list shows their names"
        if requires_key
        else "none, so only this machine can use the endpoint: peagle serve keys --help"
    )
    lines = [
        ("page", url.removesuffix("/v1")),
        ("API", f"{url.removesuffix('/v1')}/docs"),
        *([] if metrics_port is None else [("metrics", f"http://127.0.0.1:{metrics_port}/metrics")]),
        ("keys", access),
        ("curl", f"curl {url}/chat/completions{curl_header} -H 'Content-Type: application/json' -d '{to_json(body)}'"),
        ("Python", f"{'import os; ' if requires_key else ''}from openai import OpenAI"),
        ("", f'client = OpenAI(base_url="{url}", api_key={api_key})'),
        ("", f"reply = client.chat.completions.create({', '.join(f'{k}={to_json(v)}' for k, v in body.items())})"),
        ("", "print(reply.choices[0].message.content)"),
    ]
    return "\n".join(f"{label:<8} {text}" for label, text in lines)


def dry_run(config: ServeConfig) -> tuple[int, dict[str, Any]]:
    """Print a forecast of the endpoint, and start nothing."""
    from pipelines.online.forecast import forecast

    return print_forecast(forecast(config, print))


def _deploy(config: ServeConfig, hardware: Any, served: "list[EndpointModel]", *, is_remote: bool) -> None:
    """Start the application and wait for its engines; remove it on failure.

    Raises:
        ConfigError: the cluster already has an endpoint, or its Serve instance listens on another address.
        EngineError: an engine did not start.
    """
    from ray import serve

    from pipelines.online.app import bind

    # Serve replaces an application of the same name, so this would end another endpoint.
    existing = serve.status().applications.get(APP_NAME)
    if existing is not None and existing.status != "DEPLOY_FAILED":
        raise ConfigError(
            f"this cluster's Serve already has an application `{APP_NAME}` ({existing.status.value})",
            hint="stop that `peagle serve`; if it is no longer running, delete the application with:\n"
            f"  python -c \"from ray import serve; serve.delete('{APP_NAME}')\"",
        )
    for model in served:
        print(model.describe(), flush=True)
    serve.start(http_options=_http_options(config), logging_config={"enable_access_log": False})
    _require_address(config)
    application = bind(config, hardware, served)
    try:
        _start_application(application, config.state)
    except BaseException:  # including Ctrl-C: a remote cluster would keep the application
        _shutdown(config, is_remote=is_remote, is_up=False)
        raise


def _http_options(config: ServeConfig) -> dict[str, Any]:
    """Return Serve's HTTP options. The certificate files must exist on each node with a proxy."""
    files = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
    return {
        "host": config.host,
        "port": config.port,
        **{name: str(path.absolute()) for name, path in files.items() if path is not None},
    }


def _require_address(config: ServeConfig) -> None:
    """Check that a running Serve instance listens on the configured address. Serve itself would only log a warning."""
    from pipelines.online.serve.ray_names import running_http_options

    running, configured = running_http_options(), _http_options(config)
    files = {"ssl_certfile": running.ssl_certfile, "ssl_keyfile": running.ssl_keyfile}
    if any(path != configured.get(name) for name, path in files.items()):
        running_tls = f"with the certificate {running.ssl_certfile}" if running.ssl_certfile else "without TLS"
        raise ConfigError(
            f"Serve is already running on this cluster {running_tls}",
            hint="use the same --tls-cert and --tls-key, or stop that Serve with all its applications: "
            "`serve shutdown`",
        )
    if (running.host, running.port) != (config.host, config.port):
        raise ConfigError(
            f"Serve is already running on this cluster, and listens on {running.host}:{running.port}, "
            f"not on {config.host}:{config.port}",
            hint=f"use --host {running.host} --port {running.port}, or stop that Serve with all its applications: "
            "`serve shutdown`",
        )


def _start_application(application: Any, state: Path) -> None:
    from ray import serve

    from peagle.economics.ledger import read_sessions
    from peagle.economics.usage import start_warnings
    from peagle.engine.self_check import require_none_failed
    from peagle.engine.startup import format_start_warning
    from peagle.engine.vllm_internals import with_root_cause
    from peagle.errors import EngineError

    ledger, logs = state / "ledger", state / "logs"
    logs_before = set(logs.glob("engine-*.log"))
    sessions_before = {session.session_id for session in read_sessions(ledger)}

    def new_sessions() -> "list[EngineSession]":
        return [session for session in read_sessions(ledger) if session.session_id not in sessions_before]

    try:
        serve.run(application, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:  # Serve gave up
        require_none_failed(session.self_check for session in new_sessions())
        new_logs = sorted(set(logs.glob("engine-*.log")) - logs_before)
        log_text = "\n".join(log.read_text(errors="replace") for log in new_logs)
        raise with_root_cause(EngineError(f"the endpoint did not start: {error}"), log_text) from error
    for warning in start_warnings(new_sessions()):
        print(format_start_warning(warning), flush=True)


def _wait_until_stopped(
    config: ServeConfig, hardware: Any, served: "list[EndpointModel]", stopped: threading.Event
) -> None:
    """Wait for the stop event, and warn about drafters that cost more than they save."""
    from pipelines.online.cost import CostView
    from pipelines.online.live import watch_drafters
    from pipelines.online.serve.ray_names import watch_processes

    watch_processes(stopped, partial(print, flush=True))
    watches = {}
    for model in served:
        name = model.options.served_name
        for note in model.engine.profile_notes(hardware):
            print(f"{name}: {note}", flush=True)
        if (watch := model.engine.drafter_watch(hardware)) is not None:
            watches[name] = watch
    if watches:
        view = CostView(config.state / "ledger", resolve_price(config, hardware))
        watch_drafters(watches, view, stopped, print)
    stopped.wait()


def _shutdown(config: ServeConfig, *, is_remote: bool, is_up: bool) -> None:
    """Delete the application and wait for its requests; stop Serve if it was started here."""
    from ray import serve

    from pipelines.online.serve.ray_names import begin_deletion

    if is_up or is_remote:
        # Serve kills the application after `drain_s`. If its controller dies meanwhile, the new controller waits for
        # the full `drain_s` again, so the deletion may take twice as long.
        limit_s = 2 * max(model.drain_s for model in config.served) + _DELETE_MARGIN_S
        give_up_at = time.monotonic() + limit_s
        begin_deletion(APP_NAME)
        while APP_NAME in serve.status().applications:
            if time.monotonic() >= give_up_at:
                print(f"the application was not deleted within {limit_s:g} s: see Serve's log", flush=True)
                break
            time.sleep(_POLL_S)
    if not is_remote:
        serve.shutdown()  # kills the proxies and all their connections


if __name__ == "__main__":
    from jobs.cli import main

    main(["serve", *sys.argv[1:]])
