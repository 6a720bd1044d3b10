import contextlib
import signal
from dataclasses import replace

import pyarrow as pa
import pytest
from moving_hub import FIRST_COMMIT, SECOND_COMMIT
from rich.console import Console
from usage_records import unit_usage

from peagle.engine.fake import ByteTokenizer
from peagle.errors import CapacityError, ConfigError, InputError, PriceError, StoppedEarly
from peagle.hardware import Hardware
from peagle.runs.progress import RunProgress
from pipelines.batch import decide as decide_module
from pipelines.batch import run as run_module
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import RunRequest
from pipelines.batch.run import create_or_continue
from pipelines.cluster import ray

COMMAND = ["peagle", "generate"]
USAGE = unit_usage(num_rows=12, num_prompt_tokens=24, num_output_tokens=24)
MODEL = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 8192}
HEAD = {"hidden_size": 576, "vocab_size": 49152, "ptd_token_id": 7}


def run_generate(config, **request_fields):
    request = RunRequest(config=config, command=COMMAND, **request_fields)
    return run_module.generate(request, RunProgress(Console(quiet=True)))


def test_stored_plan_replaces_the_plan_of_a_concurrent_start(resolved_run):
    (request, second), (_, first) = resolved_run(rows_per_unit=5), resolved_run(rows_per_unit=2)
    assert create_or_continue(request, first) == first.plan
    stored_plan = create_or_continue(request, second)
    assert [(unit.first_id, unit.num_rows) for unit in stored_plan.units] == [(n, 2) for n in range(0, 12, 2)]
    assert stored_plan == second.directory.plan() == first.plan


def test_served_name_is_stored(resolved_run):
    create_or_continue(*resolved_run(served_name="plain"))
    request, other = resolved_run(served_name="other")
    create_or_continue(request, other)
    assert other.directory.manifest()["served_name"] == "plain"


def test_run_with_old_fingerprint_format_continues_only_with_the_same_corpus(resolved_run, tmp_path):
    request, run = resolved_run()
    old_plan = replace(run.plan, corpus_fingerprint=run.plan.corpus_fingerprint.removeprefix("2:"))  # format 1
    assert create_or_continue(request, replace(run, plan=old_plan)) == old_plan
    assert create_or_continue(request, run) == old_plan
    (tmp_path / "in.jsonl").write_text('{"prompt": "another"}\n' * 12)
    with pytest.raises(ConfigError, match=r"different settings or input(.|\n)*corpus\.content"):
        create_or_continue(request, run)


@pytest.fixture
def run_without_accelerators(resolved_run, monkeypatch):
    """A finished H100 run, and a function that restarts it on a cluster that never gets accelerators."""
    h100 = Hardware(
        platform="cuda", accelerator="NVIDIA H100 80GB HBM3", num_accelerators=1, compute_capability=(9, 0),
        memory_gib=79.6, free_memory_gib=70, num_cpus=16,
    )  # fmt: skip
    request, first = resolved_run(hardware=h100, accelerator_type="H100", rows_per_unit=12)
    create_or_continue(request, first)
    run = first.directory
    run.commit(0, pa.table({"id": [str(row) for row in range(12)]}), USAGE, [])

    def fail_to_get_nodes(*_, **__):
        raise CapacityError("no nodes arrived")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "ray_cluster", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(ray, "_nodes", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr(ray, "require_capacity", fail_to_get_nodes)
    monkeypatch.setattr(run_module, "make_report", lambda run: {})

    def restart(**options):
        return run_generate(request.config.model_copy(update=options))

    return run, restart


def test_finished_run_needs_no_accelerators(run_without_accelerators):
    run, restart = run_without_accelerators
    assert restart().was_already_finished
    with pytest.raises(ConfigError, match=r"different settings or input(.|\n)*max_tokens: was 256, now 8"):
        restart(max_tokens=8)
    run.unit_path(0).unlink()
    with pytest.raises(CapacityError, match="no nodes arrived"):
        restart()


def test_retry_waits_for_accelerators_only_with_failed_rows(run_without_accelerators):
    run, restart = run_without_accelerators
    assert restart(retry_failed=True).was_already_finished  # no row failed
    run.unit_path(0).unlink()
    dead_letter = {"id": "000000011", "reason": "refused", "message": "odd", "row": {"prompt": "p11"}}
    run.commit(
        0, pa.table({"id": [f"{row:09d}" for row in range(11)]}), replace(USAGE, num_failed_rows=1), [dead_letter]
    )
    assert restart().was_already_finished
    with pytest.raises(CapacityError, match="no nodes arrived"):
        restart(retry_failed=True)


def test_invalid_run_does_not_wait_for_accelerators(run_without_accelerators, tmp_path):
    _, restart = run_without_accelerators
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(InputError, match=r"in\.jsonl"):
        restart(output=tmp_path / "another")
    with pytest.raises(ConfigError, match="has no run, so there are no failed rows"):
        restart(output=tmp_path / "another", retry_failed=True)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_early_signal_names_the_resume_command(resolved_run, monkeypatch, signal_number):
    config = resolved_run()[0].config
    monkeypatch.setattr(decide_module, "make_plan", lambda *_, **__: signal.raise_signal(signal_number))
    with pytest.raises(StoppedEarly, match="before an engine was running: stopped by a signal") as error:
        run_generate(config)
    assert error.value.hint == "the same command continues the run: peagle generate"


def test_accelerator_price_is_refused_for_cpu_engines(resolved_run):
    with pytest.raises(PriceError, match=r"g5\.xlarge is per accelerator, but engines here are billed by the vcpu"):
        resolved_run(usd_per_hour=None, instance_type="g5.xlarge")


def test_price_of_a_run_cannot_change(resolved_run):
    for options in ({}, {"engines": 2}, {"usd_per_hour": None}):
        create_or_continue(*resolved_run(**options))
    with pytest.raises(PriceError, match=r"the run costs \$.*, but would now cost \$"):
        create_or_continue(*resolved_run(usd_per_hour=2))
    request, batch = resolved_run(usd_per_hour=2)
    create_or_continue(request, replace(batch, slot_group="endpoint"))  # a batch of an endpoint keeps its price


@pytest.fixture
def start_hub_run(moving_hub, monkeypatch, tmp_path):
    """Return a function that starts or resumes a run with a hub model and head, but starts no engine.

    The function returns the engine spec.
    """
    moving_hub.push("org/model", FIRST_COMMIT, MODEL)
    moving_hub.push("org/head", FIRST_COMMIT, HEAD)
    (tmp_path / "in.jsonl").write_text('{"prompt": "p"}\n')
    specs = []
    monkeypatch.setattr("pipelines.batch.resolve.tokenizer_of", lambda model, revision: ByteTokenizer())
    monkeypatch.setattr(ray, "ray_cluster", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(ray, "require_capacity", lambda *_, **__: None)
    monkeypatch.setattr(run_module, "stream", lambda run, *_: specs.append(run.spec))

    def start(name="run", **request_fields):
        config = GenerateConfig(
            input=str(tmp_path / "in.jsonl"), output=tmp_path / name, model="org/model", drafter="org/head",
            usd_per_hour=1,
        )  # fmt: skip
        run_generate(config, **request_fields)
        return specs[-1]

    return start


def test_run_keeps_the_commits_of_its_models(start_hub_run, moving_hub):
    before = start_hub_run()
    assert before.commits == {"org/model": FIRST_COMMIT, "org/head": FIRST_COMMIT}
    moving_hub.push("org/model", SECOND_COMMIT, MODEL)
    moving_hub.push("org/head", SECOND_COMMIT, HEAD)
    assert start_hub_run() == before
    assert start_hub_run("another").commits == {"org/model": SECOND_COMMIT, "org/head": SECOND_COMMIT}


def test_batch_uses_the_endpoints_commits(start_hub_run, moving_hub):
    endpoint = {"org/model": FIRST_COMMIT, "org/head": FIRST_COMMIT}
    moving_hub.push("org/model", SECOND_COMMIT, MODEL)
    moving_hub.push("org/head", SECOND_COMMIT, HEAD)
    assert start_hub_run(commits=endpoint).commits == endpoint
    assert start_hub_run(commits={"org/model": SECOND_COMMIT, "org/head": SECOND_COMMIT}).commits == endpoint


def test_nodes_per_engine_needs_a_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = GenerateConfig(input="i", output=tmp_path / "run", tensor_parallel_size=2, nodes_per_engine=2)
    with pytest.raises(ConfigError, match=r"nodes_per_engine 2: RAY_ADDRESS is not set(.|\n)*RAY_ADDRESS to a"):
        run_generate(config)
