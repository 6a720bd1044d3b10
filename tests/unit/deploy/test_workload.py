import pytest
from tuned_profiles import cell, cells, profile  # noqa: F401 - fixtures

from jobs.deploying import read_workload
from peagle.deploy.workload import count_machines, dns_label, offer_of, require_reachable, require_room
from peagle.economics.price_options import PriceOptions
from peagle.economics.prices import Offer, PriceTable
from peagle.engine.keys import TargetOptions
from peagle.errors import CapacityError, ConfigError, PrecisionError, PriceError

EIGHT_GPUS = Offer(instance_type="eight", num_accelerators=8, num_vcpus=1, usd_per_hour_spot=1.0)
NO_GPU = Offer(instance_type="cpu", num_vcpus=8, usd_per_hour_spot=1.0)


@pytest.mark.parametrize(
    ("offer", "parts", "num_machines"),  # a part: the accelerators of an engine, and the number of such engines
    [
        (EIGHT_GPUS, [(1, 8)], 1),
        (EIGHT_GPUS, [(1, 9)], 2),
        (EIGHT_GPUS, [(4, 3), (8, 1)], 3),
        (EIGHT_GPUS, [(5, 2), (3, 2)], 2),
        (EIGHT_GPUS, [(5, 2), (2, 2), (1, 2)], 2),
        (EIGHT_GPUS, [(1, 0)], 0),
        (NO_GPU, [(1, 3)], 3),
    ],
)
def test_engines_are_packed_onto_machines(offer, parts, num_machines):
    assert count_machines(offer, parts) == num_machines
    with pytest.raises(ConfigError, match="needs 9 accelerators of one machine, and eight has 8"):
        count_machines(EIGHT_GPUS, [(9, 1)])


def test_configuration_must_name_a_machine_with_a_price(tmp_path):
    offer = offer_of(PriceOptions(instance_type="p5.48xlarge", region="us-east-2", market="spot"))
    assert (offer.region, offer.num_accelerators) == ("us-east-2", 8)
    with pytest.raises(ConfigError, match="has no instance_type") as error:
        offer_of(PriceOptions())
    assert "p5.48xlarge" in error.value.hint
    with pytest.raises(PriceError, match=r"no price for the instance type 'p6\.48xlarge'"):
        offer_of(PriceOptions(instance_type="p6.48xlarge"))
    with pytest.raises(ConfigError, match="other machines do not have this file"):
        offer_of(PriceOptions(instance_type="p5.48xlarge", prices=tmp_path / "mine.csv"))


def test_dns_label_is_made_of_a_name_or_refused():
    assert dns_label("peagle-8 GPUs_", max_length=20) == "peagle-8-gpus"
    for name in ("8 GPUs", "..."):
        with pytest.raises(ConfigError, match="does not start with a letter"):
            dns_label(name, max_length=20)
    with pytest.raises(ConfigError, match="has 6 characters; the limit is 5"):
        dns_label("abcdef", max_length=5)


def test_local_paths_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    for settings in ({"input": "in.jsonl"}, {"output": "/mnt/peaglet/run"}, {"model": str(tmp_path / "model")}):
        with pytest.raises(ConfigError, match="a local path"):
            require_reachable(settings, ("input", "output", "model"), "/mnt/peagle")
    settings = {"input": "s3://bucket/in", "output": "/mnt/peagle/run", "model": "Org/model"}
    require_reachable(settings, ("input", "output", "model", "drafter"), "/mnt/peagle")


def test_workload_has_settings_of_configuration_and_profile(tmp_path, monkeypatch, profile):  # noqa: F811
    from peagle.profiles.profile import write_profile

    monkeypatch.setenv("PEAGLE_TOP_K", "3")  # variables of this shell do not apply to other machines
    write_profile(tmp_path / "profile.yaml", profile)
    path = tmp_path / "My_run.yaml"
    path.write_text(
        "input: s3://b/in\noutput: s3://b/out\nmax_tokens: 5\nengines: 3:9\ninstance_type: g7e.12xlarge\n"
        f"grace_s: 40\nprofile: {tmp_path / 'profile.yaml'}\n"
    )
    workload = read_workload(path, None, max_name_length=20)
    assert (workload.name, workload.command) == ("peagle-my-run", "generate")
    assert (workload.num_machines, workload.grace_s) == ((2, 5), 100)
    assert (workload.settings["max_num_seqs"], workload.settings["max_tokens"]) == (4, 5)
    assert {"top_k", "profile"}.isdisjoint(workload.settings)


def test_endpoint_has_machines_for_the_most_replicas_of_all_models(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "instance_type: g7e.12xlarge\nmodels:\n- {name: a, tensor_parallel_size: 2, max_replicas: 2}\n"
        "- {name: b, min_replicas: 0, max_replicas: 3}\n"
    )
    assert read_workload(path, "team", max_name_length=20).num_machines == (4, 4)


MODEL = "qwen3-coder-30b-a3b-instruct"


def offer_by_name(instance_type):
    return PriceTable.load().offer(instance_type)


def target_options(**options):
    return TargetOptions.model_validate({"model": MODEL, **options})


@pytest.mark.parametrize(
    ("instance_type", "options", "message"),
    [
        ("g6.xlarge", {}, r"g6\.xlarge: .*weights 28\.4.*1 x L4 at 90%"),
        ("g5.xlarge", {}, r"weights 56\.8.*1 x A10G"),  # Ampere has no FP8
        ("g6.xlarge", {"model": "Qwen/Qwen3-Coder-30B-A3B-Instruct"}, "1 x L4"),
        ("p5.4xlarge", {"model": "gpt-oss-120b", "gpu_memory_utilization": 0.5}, "1 x H100 80GB HBM3 at 50%"),
        ("c7a.large", {}, r"are 56\.8 GiB, and c7a\.large has 4 GiB of memory and no accelerator"),
    ],
)
def test_too_small_machine_is_refused(instance_type, options, message):
    with pytest.raises(CapacityError, match=message) as error:
        require_room(offer_by_name(instance_type), target_options(**options))
    assert "name a larger instance type" in error.value.hint
    with pytest.raises(PrecisionError, match="fp8"):
        require_room(offer_by_name("p4d.24xlarge"), target_options(precision="fp8"))


@pytest.mark.parametrize(
    ("instance_type", "options"),
    [
        ("g7e.2xlarge", {}),
        ("g6.xlarge", {"tensor_parallel_size": 2}),  # the number of accelerators is checked elsewhere
        ("g6.xlarge", {"model": "org/nobody-knows"}),
        ("c7a.large", {"model": "smollm2-135m"}),
    ],
)
def test_large_enough_or_unknown_machine_is_accepted(instance_type, options):
    require_room(offer_by_name(instance_type), target_options(**options))
    require_room(
        Offer(instance_type="x", accelerator="T9", num_accelerators=1, usd_per_hour_on_demand=1.0), target_options()
    )


@pytest.mark.parametrize(
    "text",
    [
        f"input: s3://b/in\noutput: s3://b/out\nmodel: {MODEL}\ninstance_type: g6.xlarge\n",
        f"keys: k.json\ninstance_type: g6.xlarge\nmodels:\n- model: smollm2-135m\n- model: {MODEL}\n",
    ],
)
def test_each_model_of_a_configuration_is_checked(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(CapacityError, match="1 x L4"):
        read_workload(path, None, max_name_length=40)
