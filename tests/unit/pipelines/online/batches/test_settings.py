from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.hardware import Hardware
from pipelines.batch.config import GenerateConfig
from pipelines.cluster.placement import Placement
from pipelines.online.batches.settings import batch_engine_range, batch_settings
from pipelines.online.config import ServeConfig
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import GateSettings

CPU = Hardware(platform="cpu", memory_gib=16, free_memory_gib=16, num_cpus=2)
PLACEMENT = Placement(num_cpus=1, num_gpus=0, num_devices=2, device="vcpu", num_engines_on_node=1)
HEAD = DrafterSpec(method="peagle", model="org/head", num_speculative_tokens=3, revision="b" * 40)
SPEC = EngineSpec(model="org/model", revision="a" * 40, drafter=HEAD)


def settings_of(config, tmp_path):
    models = tuple(ServedModel(name=options.served_name, max_model_len=100) for options in config.served)
    gate = GateSettings(models=models, ledger=tmp_path)
    placements, specs = {model.name: PLACEMENT for model in models}, {model.name: SPEC for model in models}
    return batch_settings(config, gate, CPU, placements, specs, "app")


def test_no_folder_disables_batches(tmp_path):
    config = ServeConfig(batch_engines="2")
    assert batch_engine_range(config) == (0, 0)
    assert settings_of(config, tmp_path) is None


def test_engines_of_concurrent_batches_are_counted(tmp_path):
    config = ServeConfig(batches=str(tmp_path), batches_at_once=3, batch_engines="1:4")
    assert batch_engine_range(config) == (3, 12)


def test_batch_has_the_engine_settings_of_its_model(tmp_path):
    config = ServeConfig(
        batches=str(tmp_path / "b"),
        usd_per_hour=2,
        max_num_seqs=4,
        models=[{"name": "fast", "num_speculative_tokens": 5}, {"name": "plain", "drafter": "none"}],
    )
    models = settings_of(config, tmp_path).models
    for options in config.served:
        run = GenerateConfig(input="x", output=tmp_path / "run", **models[options.served_name].config)
        for name in ("model", "drafter", "num_speculative_tokens", "max_num_seqs", "precision"):
            assert getattr(run, name) == getattr(options, name)
        assert run.usd_per_hour == 2
        assert models[options.served_name].neighbours.slot_group == "app"
        assert models[options.served_name].commits == {"org/model": "a" * 40, "org/head": "b" * 40}


def test_batches_on_the_endpoints_engines_need_no_cores(tmp_path):
    config = ServeConfig(batches=str(tmp_path / "b"), batch_engines="endpoint", max_replicas=3, usd_per_hour=2)
    settings = settings_of(config, tmp_path)
    batch_model = settings.models["smollm2-135m"]
    assert (batch_engine_range(config), settings.uses_idle_slots) == ((0, 0), True)
    assert batch_model.lent_slots == 3 * SPEC.max_num_seqs
    assert GenerateConfig(input="x", output=tmp_path / "run", **batch_model.config).engines == "1"
    placement = batch_model.neighbours.placement
    assert (placement.num_cpus < 0.1, placement.num_devices, placement.device) == (True, 2, "vcpu")
    assert batch_model.neighbours.slot_group != "app", "a batch process must not take an engine's cores"
    assert not settings_of(ServeConfig(batches=str(tmp_path / "b")), tmp_path).uses_idle_slots
    assert not ServeConfig(batch_engines="endpoint").uses_idle_slots, "batches are disabled"
