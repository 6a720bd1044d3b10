import contextlib
import json
import signal
from dataclasses import replace

import pyarrow as pa
import pytest
from moving_hub import FIRST, SECOND
from rich.console import Console

from peagle import hardware
from peagle.economics.usage import UnitUsage
from peagle.engine.fake import ByteTokenizer
from peagle.errors import CapacityError, ConfigError, InputError, PriceError, StoppedEarly
from peagle.hardware import Hardware
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import make_plan
from peagle.runs.progress import Progress
from peagle.speculation import SpeculationStats
from pipelines.batch import resolve as resolve_module
from pipelines.batch import run as run_module
from pipelines.batch.config import GenerateConfig
from pipelines.batch.resolve import resolve
from pipelines.batch.run import _open

HERE = hardware.detect()
COMMAND = ["peagle", "generate"]
USAGE = UnitUsage(
    session_id="s", num_rows=12, num_failed_rows=0, num_prompt_tokens=24, num_cached_tokens=0, num_output_tokens=24,
    busy_s=1.0, speculation=SpeculationStats.empty(), started_at=1.0, finished_at=2.0,
)  # fmt: skip
MODEL = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 8192}
HEAD = {"hidden_size": 576, "vocab_size": 49152, "ptd_token_id": 7}


@pytest.fixture
def driver(tmp_path):
    """What a driver knows when it takes the lease: its plan, made or read, and its resolved run."""
    corpus = tmp_path / "in.jsonl"
    corpus.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(12)))

    def make(*, hardware=HERE, **keys):
        keys = {"usd_per_hour": 1, **keys}
        config = GenerateConfig(input=str(corpus), output=tmp_path / "run", engine="fake", **keys)
        plan = make_plan(config)
        return plan, resolve(config, hardware, plan.schema.names, announce=print)

    return make


def test_a_driver_that_planned_before_another_created_the_run_drives_the_units_that_are_written_down(driver, tmp_path):
    run = RunDirectory(tmp_path / "run")
    second, second_run = driver(rows_per_unit=5)
    first, first_run = driver(rows_per_unit=2)
    assert _open(run, first, first_run, COMMAND) == first
    opened = _open(run, second, second_run, COMMAND)
    assert [(unit.first_id, unit.num_rows) for unit in opened.units] == [(n, 2) for n in range(0, 12, 2)]
    assert opened == run.plan() == first


def test_a_run_remembers_what_its_model_is_called_by_who_began_it(driver, tmp_path):
    run = RunDirectory(tmp_path / "run")
    plan, resolved = driver()
    _open(run, plan, resolved, COMMAND, "plain")
    _open(run, plan, resolved, COMMAND, "other")
    assert run.manifest()["served_name"] == "plain"


def test_a_run_that_an_older_peagle_began_goes_on_with_the_same_corpus_and_with_no_other(driver, tmp_path):
    run = RunDirectory(tmp_path / "run")
    plan, resolved = driver()
    older = replace(plan, corpus_fingerprint=plan.corpus_fingerprint.removeprefix("2:"))
    assert _open(run, older, resolved, COMMAND) == older
    assert _open(run, run.plan(), resolved, COMMAND) == older
    (tmp_path / "in.jsonl").write_text('{"prompt": "another"}\n' * 12)
    with pytest.raises(ConfigError, match=r"another fingerprint(.|\n)*corpus\.content"):
        _open(run, run.plan(), resolved, COMMAND)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [("inspect", 2, None)]),
        ({"accelerator_type": "H100"}, [("require", 2, "H100", 3, 900.0), ("inspect", 2, "H100")]),
        ({"accelerator_type": "any"}, [("require", 2, None, 3, 900.0), ("inspect", 2, "any")]),
        (
            {"accelerator_type": "any", "engines": "3", "nodes_per_engine": 2},
            [("require", 1, None, 3, 900.0), ("inspect", 1, "any")],
        ),
    ],
)
def test_a_cluster_whose_engines_need_accelerators_has_them_before_it_is_looked_at(
    monkeypatch, tmp_path, keys, expected
):
    done = []
    keys = {"engines": "3:9"} | keys
    config = GenerateConfig(input="i", output=tmp_path, cluster_wait_s=900, tensor_parallel_size=2, **keys)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(
        resolve_module.cluster,
        "require_capacity",
        lambda p, n, *, wait_s, check, announce: done.append(("require", p.num_gpus, p.accelerator_type, n, wait_s)),
    )
    monkeypatch.setattr(
        resolve_module.cluster,
        "inspect",
        lambda *, accelerators_per_engine, nodes_per_engine, accelerator_type: done.append(
            ("inspect", accelerators_per_engine // nodes_per_engine, accelerator_type)
        ),
    )
    resolve_module.hardware_for(RunDirectory(tmp_path), config, check=lambda: None, announce=print)
    assert done == expected


@pytest.fixture
def on_no_accelerator(driver, monkeypatch, tmp_path):
    """Starts a finished run on H100s again, on a cluster that would be waited for in vain."""
    h100 = Hardware(
        platform="cuda", accelerator="NVIDIA H100 80GB HBM3", num_accelerators=1, compute_capability=(9, 0),
        memory_gib=79.6, free_memory_gib=70, num_cpus=16,
    )  # fmt: skip
    plan, resolved = driver(hardware=h100, accelerator_type="H100", rows_per_unit=12)
    run = RunDirectory(tmp_path / "run")
    _open(run, plan, resolved, COMMAND)
    run.commit(0, pa.table({"id": [str(row) for row in range(12)]}), USAGE, [])

    def wait(*_, **__):
        raise CapacityError("they do not come")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(run_module.cluster, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr(run_module.cluster, "_nodes", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr(run_module.cluster, "require_capacity", wait)
    monkeypatch.setattr(run_module, "make_report", lambda run: {})

    def again(**keys):
        config = resolved.config.model_copy(update=keys)
        return run_module.generate(config, Progress(Console(quiet=True)), command=COMMAND)

    return run, again


def test_a_finished_run_that_is_started_again_waits_for_no_accelerators(on_no_accelerator):
    run, again = on_no_accelerator
    assert again().did_nothing
    with pytest.raises(ConfigError, match=r"another fingerprint(.|\n)*max_tokens: it was 256, now it is 8"):
        again(max_tokens=8)
    run.unit_path(0).unlink()
    with pytest.raises(CapacityError, match="they do not come"):
        again()


def test_failed_rows_are_what_nodes_are_waited_for_when_only_they_are_taken_up(on_no_accelerator):
    run, again = on_no_accelerator
    assert again(retry_failed=True).did_nothing  # none failed
    run.unit_path(0).unlink()
    letter = {"id": "000000011", "reason": "refused", "message": "odd", "row": {"prompt": "p11"}}
    run.commit(0, pa.table({"id": [f"{row:09d}" for row in range(11)]}), replace(USAGE, num_failed_rows=1), [letter])
    assert again().did_nothing
    with pytest.raises(CapacityError, match="they do not come"):
        again(retry_failed=True)


def test_accelerators_are_not_waited_for_by_what_cannot_begin_or_go_on(on_no_accelerator, tmp_path):
    _, again = on_no_accelerator
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(InputError, match=r"in\.jsonl"):
        again(output=tmp_path / "another")
    with pytest.raises(ConfigError, match="holds no run whose failed rows"):
        again(output=tmp_path / "another", retry_failed=True)


def test_a_run_that_began_on_cpus_does_not_wait_for_accelerators(driver, tmp_path):
    plan, resolved = driver()
    run = RunDirectory(tmp_path / "run")
    _open(run, plan, resolved, COMMAND)
    config = resolved.config.model_copy(update={"accelerator_type": "H100"})
    with pytest.raises(ConfigError, match=r"began on .*accelerator_type H100 cannot continue it"):
        resolve_module.hardware_for(run, config, check=lambda: None, announce=print)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_engines_are_at_work_ends_with_the_command_that_goes_on(driver, monkeypatch, number):
    config = driver()[1].config
    monkeypatch.setattr(run_module, "make_plan", lambda *_, **__: signal.raise_signal(number))
    with pytest.raises(StoppedEarly, match="no engine was at work: asked to by a signal") as stopped:
        run_module.generate(config, Progress(Console(quiet=True)), command=COMMAND)
    assert stopped.value.hint == "the same command continues: peagle generate"


def test_a_price_by_the_accelerator_is_refused_for_engines_on_cpus(driver):
    with pytest.raises(PriceError, match=r"g5\.xlarge is per accelerator, and engines here are paid for by the vcpu"):
        driver(usd_per_hour=None, instance_type="g5.xlarge")


def test_a_run_that_is_continued_at_another_price_is_refused_and_the_same_or_none_is_not(driver, tmp_path):
    run = RunDirectory(tmp_path / "run")
    for keys in ({}, {"engines": 2}, {"usd_per_hour": None}):
        _open(run, *driver(**keys), COMMAND)
    with pytest.raises(PriceError, match=r"is charged at \$.*, and this would cost \$"):
        _open(run, *driver(usd_per_hour=2), COMMAND)
    plan, resolved = driver(usd_per_hour=2)
    _open(run, plan, replace(resolved, places="endpoint"), COMMAND)


@pytest.fixture
def hub_run(moving_hub, monkeypatch, tmp_path):
    """Starts a run, or continues it, on a model and a head of the hub; what its engines would be. None is started."""
    moving_hub.push("org/model", FIRST, MODEL)
    moving_hub.push("org/head", FIRST, HEAD)
    (tmp_path / "in.jsonl").write_text('{"prompt": "p"}\n')
    specs = []
    monkeypatch.setattr("pipelines.batch.resolve.tokenizer_of", lambda model, revision: ByteTokenizer())
    monkeypatch.setattr(run_module.cluster, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr(run_module.cluster, "require_capacity", lambda *_, **__: None)
    monkeypatch.setattr(run_module, "stream", lambda run, plan, units, resolved, *_: specs.append(resolved.spec))

    def start(name="run", **others):
        config = GenerateConfig(
            input=str(tmp_path / "in.jsonl"), output=tmp_path / name, model="org/model", drafter="org/head",
            usd_per_hour=1,
        )  # fmt: skip
        run_module.generate(config, Progress(Console(quiet=True)), command=COMMAND, **others)
        return specs[-1]

    return start


def test_a_run_is_on_one_commit_of_its_model_and_head_from_its_first_attempt_on(hub_run, moving_hub):
    before = hub_run()
    assert before.commits == {"org/model": FIRST, "org/head": FIRST}
    moving_hub.push("org/model", SECOND, MODEL)
    moving_hub.push("org/head", SECOND, HEAD)
    assert hub_run() == before
    assert hub_run("another").commits == {"org/model": SECOND, "org/head": SECOND}


def test_the_run_of_a_batch_is_on_the_commits_of_the_endpoint_and_stays_there(hub_run, moving_hub):
    endpoint = {"org/model": FIRST, "org/head": FIRST}
    moving_hub.push("org/model", SECOND, MODEL)
    moving_hub.push("org/head", SECOND, HEAD)
    assert hub_run(commits=endpoint).commits == endpoint
    assert hub_run(commits={"org/model": SECOND, "org/head": SECOND}).commits == endpoint


def test_an_engine_on_several_nodes_needs_a_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = GenerateConfig(input="i", output=tmp_path / "run", tensor_parallel_size=2, nodes_per_engine=2)
    with pytest.raises(ConfigError, match=r"nodes_per_engine 2: RAY_ADDRESS names no cluster(.|\n)*RAY_ADDRESS to a"):
        run_module.generate(config, Progress(Console(quiet=True)), command=COMMAND)
