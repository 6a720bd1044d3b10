import pickle
from types import SimpleNamespace

import pytest

from peagle.catalog.drafters import ResolvedDrafter
from peagle.economics.usage import EngineFacts
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.engine_options import ResolvedEngine
from peagle.errors import CapacityError, ConfigError, PriceError
from peagle.hardware import Hardware
from pipelines.cluster.placement import Placement, accelerator_placement
from pipelines.online import app
from pipelines.online.app import EndpointModel, endpoint_price, gate_settings, model_card, placements
from pipelines.online.config import ServeConfig
from pipelines.online.gateway.keys import new_key, write_keys
from pipelines.online.replica.account import EngineAccount
from pipelines.online.sagemaker import SageMakerConfig

CPU = Hardware(platform="cpu", memory_gib=16, free_memory_gib=16, num_cpus=2)
GPU = Hardware(
    platform="cuda", memory_gib=80, free_memory_gib=80, num_cpus=16, accelerator="NVIDIA H100 80GB HBM3",
    num_accelerators=8, compute_capability=(9, 0),
)  # fmt: skip
HEAD = DrafterSpec(method="peagle", model="head", num_speculative_tokens=3)
PLACEMENT = Placement(num_cpus=1, num_gpus=0, num_devices=2, device="vcpu", num_engines_on_node=1)


def resolve_models(config):
    engine = ResolvedEngine(
        spec=EngineSpec(model="m", drafter=HEAD, max_model_len=512),
        precision=SimpleNamespace(describe=lambda: "bf16"),
        model=SimpleNamespace(name="m", card=None, vocab_size=100, config={}),
        drafter=ResolvedDrafter(spec=HEAD, name="head", note="as requested", fingerprint="f"),
    )
    return [EndpointModel(options=options, engine=engine, placement=PLACEMENT) for options in config.served]


def make_settings(tmp_path, **options):
    config = ServeConfig(state=tmp_path, **options)
    return gate_settings(config, CPU, resolve_models(config))


def test_build_requires_a_token(tmp_path, monkeypatch):
    def refuse():
        raise ConfigError("the cluster requires no token")

    monkeypatch.setattr(app, "require_token", refuse)
    monkeypatch.setattr(app, "inspect", lambda: pytest.fail("the build continued"))
    with pytest.raises(ConfigError, match="no token"):
        app.build(ServeConfig(state=tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_keys(tmp_path, host):
    assert not make_settings(tmp_path, host=host).requires_key


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_public_address_needs_keys(tmp_path, host):
    with pytest.raises(ConfigError, match="without API keys"):
        make_settings(tmp_path, host=host)


def test_sagemaker_needs_no_keys(tmp_path):
    config = SageMakerConfig(state=tmp_path, model="m")
    gate = gate_settings(config, CPU, resolve_models(config))
    assert (config.host, gate.requires_key, gate.is_behind_sagemaker) == ("0.0.0.0", False, True)
    assert not make_settings(tmp_path).is_behind_sagemaker


def test_keys_are_read_from_file_or_environment(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    write_keys(path, [new_key("alice")[1]])
    assert make_settings(tmp_path, host="0.0.0.0", keys=path).key_file == path
    monkeypatch.setenv("PEAGLE_API_KEYS", "ci=0123456789abcdef")
    (record,) = make_settings(tmp_path, host="0.0.0.0").fixed_keys
    assert record.name == "ci"


def test_cache_salt_survives_a_restart_and_is_none_if_the_cache_is_shared(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_API_KEYS", "ci=0123456789abcdef")
    (record,) = make_settings(tmp_path).fixed_keys
    separate = make_settings(tmp_path)
    restarted = pickle.loads(pickle.dumps(separate))  # a restarted ingress unpickles its settings
    assert separate.cache_salt(record) == restarted.cache_salt(record)
    assert make_settings(tmp_path, share_prefix_cache=True).cache_salt(record) is None


def test_gate_gets_the_limits_and_parsers_of_each_model(tmp_path):
    options = {"name": "b", "tool_call_parser": "hermes", "engine_args": {"reasoning_config": {}}}
    (plain, with_parsers) = make_settings(tmp_path, models=[{"name": "a"}, options]).models
    assert (plain.name, with_parsers.name) == ("a", "b")
    assert (plain.parsers, with_parsers.parsers) == (set(), {"tool_call_parser", "reasoning_parser"})
    assert (plain.max_model_len, plain.num_speculative_tokens, plain.can_seed) == (512, 3, False)
    assert plain.max_choices == 128


def test_cores_are_divided_among_engines_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "resolve_engine", lambda *_, **__: resolve_models(ServeConfig())[0].engine)

    def placement(**options):
        return app.resolve(ServeConfig(**options), CPU, num_nodes=1, announce=print)[0].placement

    assert placement() == Placement(num_cpus=1, num_gpus=0, num_devices=2, device="vcpu", num_engines_on_node=1)
    folder = tmp_path / "batches"
    assert placement(batches=folder) == Placement(
        num_cpus=0.5, num_gpus=0, num_devices=1, device="vcpu", num_engines_on_node=2
    )
    assert not folder.exists()
    app.prepare_batches(ServeConfig(batches=folder))
    assert (folder / "runs").is_dir()
    with pytest.raises(CapacityError, match="3 engines need a CPU core each"):
        placement(batches=folder, batches_at_once=2)
    with pytest.raises(CapacityError, match="4 engines need a CPU core each") as error:
        placement(max_replicas=4)
    assert "at most 2 fit: the sum of --max-replicas" in error.value.hint
    assert "--engines" not in error.value.hint


@pytest.mark.parametrize(
    ("options", "is_compiled", "is_eager"),
    [({}, False, True), ({}, True, False), ({"enforce_eager": False}, False, False), ({"models": [{}]}, False, True)],
)
def test_endpoint_on_a_cpu_is_eager_without_compiled_code(options, is_compiled, is_eager, monkeypatch, embedded_target):
    monkeypatch.setattr("pipelines.batch.resolve.has_compiled_code", lambda *_: is_compiled)
    messages = []
    (model,) = app.resolve(ServeConfig(drafter="none", **options), CPU, num_nodes=1, announce=messages.append)
    assert model.engine.spec.enforce_eager == is_eager
    assert any("--no-enforce-eager" in text for text in messages) == is_eager


def test_engine_larger_than_a_node_is_refused(embedded_target):
    with pytest.raises(CapacityError, match=r"1 engine.s. of 16 accelerator.s. need 16; this node has 8"):
        app.resolve(ServeConfig(tensor_parallel_size=16, drafter="none"), GPU, num_nodes=2, announce=print)


def resolve_price(tmp_path, hardware, **options):
    config = ServeConfig(state=tmp_path, engine="fake", **options)
    return endpoint_price(config, hardware, app.resolve(config, hardware, num_nodes=1, announce=print))


@pytest.mark.parametrize(("hardware", "device"), [(CPU, "vcpu"), (GPU, "accelerator")])
def test_fake_engine_is_billed_by_the_device_of_its_machine(tmp_path, hardware, device):
    assert resolve_price(tmp_path, hardware, usd_per_hour=1).device == device


def test_price_for_another_device_is_refused(tmp_path):
    with pytest.raises(
        PriceError, match=r"p5\.48xlarge is per accelerator, but the engines of fake are billed by the vcpu"
    ):
        resolve_price(tmp_path, CPU, instance_type="p5.48xlarge", provider="aws")


def test_ledger_with_prices_for_another_device_is_refused(tmp_path):
    engine = EngineFacts(model="fake", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=1)
    EngineAccount(tmp_path / "ledger", engine, heartbeat_s=300).end()
    assert resolve_price(tmp_path, CPU, usd_per_hour=1)
    with pytest.raises(PriceError, match="ledger: this ledger bills engines by the vcpu") as error:
        resolve_price(tmp_path, GPU, usd_per_hour=1)
    assert "--state" in error.value.hint


def test_model_card_describes_drafter_and_limits(tmp_path):
    config = ServeConfig(state=tmp_path, name="a", max_replicas=3)
    card = model_card(resolve_models(config)[0], 9, CPU)
    assert (card["id"], card["object"], card["owned_by"]) == ("a", "model", "peagle")
    assert card["peagle"] == {
        "target": "m",
        "stand_in": False,
        "precision": "bf16",
        "drafter": "head",
        "method": "peagle",
        "num_speculative_tokens": 3,
        "draft_lookup": False,
        "break_even_acceptance_length": {},  # not measured
        "max_model_len": 512,
        "max_replicas": 3,
        "max_requests_per_replica": 9,
    }


@pytest.fixture
def grow_cluster(monkeypatch):
    """Return a function that simulates a growing cluster. It returns a function that counts the inspections.

    Each argument is the result of an inspection: the hardware of a node, and the number of nodes.
    """

    def simulate(*results, is_kubernetes=True):
        if is_kubernetes:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        next_hardware = iter([hardware for hardware, _ in results])
        next_num_nodes = iter([num for _, num in results])
        monkeypatch.setattr(app, "inspect", lambda: next(next_hardware))
        monkeypatch.setattr(app, "num_nodes", lambda hardware: next(next_num_nodes))
        monkeypatch.setattr(app, "_POLL_S", 0.0)
        return lambda: len(results) - len(list(next_hardware))

    return simulate


ENDPOINT = {"max_replicas": 16, "drafter": "none"}  # needs two GPU nodes


def test_kubernetes_application_waits_for_its_machines(grow_cluster):
    num_inspections = grow_cluster((CPU, 1), (GPU, 1), (GPU, 2), (GPU, 2))
    assert app._wait_for_hardware(ServeConfig(instance_type="p5.48xlarge", **ENDPOINT)) is GPU
    assert num_inspections() == 3


@pytest.mark.parametrize(
    ("instance_type", "is_kubernetes"), [("p5.48xlarge", False), ("c7a.large", True), (None, True)]
)
def test_no_wait_without_kubernetes_or_instance_type(grow_cluster, instance_type, is_kubernetes):
    num_inspections = grow_cluster((CPU, 1), (GPU, 2), is_kubernetes=is_kubernetes)
    assert app._wait_for_hardware(ServeConfig(instance_type=instance_type, **ENDPOINT)) is CPU
    assert num_inspections() == 1


def test_wait_for_machines_is_limited(grow_cluster, monkeypatch):
    monkeypatch.setattr(app, "_MACHINES_WAIT_S", 0.0)
    grow_cluster((CPU, 1))
    assert app._wait_for_hardware(ServeConfig(instance_type="p5.48xlarge", **ENDPOINT)) is CPU


def gpu_node(num_accelerators):
    return Hardware(
        platform="cuda", memory_gib=80, free_memory_gib=80, num_cpus=32, accelerator="NVIDIA H100 80GB HBM3",
        num_accelerators=num_accelerators, compute_capability=(9, 0),
    )  # fmt: skip


def placements_of(num_accelerators, num_nodes=1, **options):
    return placements(ServeConfig(**options), gpu_node(num_accelerators), num_nodes=num_nodes)


BIG_MODEL = {"name": "big", "tensor_parallel_size": 4}


def test_endpoint_and_batches_can_share_the_only_accelerator(tmp_path):
    result = placements_of(1, batches=tmp_path, min_replicas=0, name="m")
    assert result == {"m": accelerator_placement(1)}


def test_engines_of_several_sizes_share_a_node():
    result = placements_of(8, models=[BIG_MODEL, {"name": "small", "max_replicas": 4}])
    assert result == {"big": accelerator_placement(4), "small": accelerator_placement(1)}


def test_engines_must_fit_together():
    with pytest.raises(
        CapacityError, match=r"need 9 accelerators at once \(big: 1 x 4, small: 5 x 1\); 1 node.* 8 "
    ) as error:
        placements_of(8, models=[BIG_MODEL, {"name": "small", "max_replicas": 5}])
    assert "--max-replicas" in error.value.hint
    assert placements_of(8, num_nodes=2, models=[BIG_MODEL, {"name": "small", "max_replicas": 5}])


def test_first_engines_of_a_batch_must_fit(tmp_path):
    assert placements_of(2, batches=tmp_path, batch_engines="2:4")
    with pytest.raises(CapacityError, match=r"batch_engines 3: a batch of m starts with 3 engine.*do not fit"):
        placements_of(2, batches=tmp_path, batch_engines="3", name="m")
    assert placements_of(2, batches=tmp_path, batch_engines="endpoint", name="m") == {"m": accelerator_placement(1)}
