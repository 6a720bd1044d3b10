"""Machines that are too small for a model are refused."""

import pytest

from jobs.deploying import read_workload
from peagle.deploy.workload import require_room
from peagle.economics.prices import Offer, PriceTable
from peagle.engine.keys import TargetOptions
from peagle.errors import CapacityError, PrecisionError

MODEL = "qwen3-coder-30b-a3b-instruct"


def offer(instance_type: str) -> Offer:
    offer_of_type = PriceTable.load().offer(instance_type)
    assert offer_of_type is not None
    return offer_of_type


def keys(**options: object) -> TargetOptions:
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
def test_too_small_machine_is_refused(instance_type: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(CapacityError, match=message) as refused:
        require_room(offer(instance_type), keys(**options))
    assert "name a larger instance type" in refused.value.hint


def test_unsupported_precision_is_refused() -> None:
    with pytest.raises(PrecisionError, match="fp8"):
        require_room(offer("p4d.24xlarge"), keys(precision="fp8"))


@pytest.mark.parametrize(
    ("instance_type", "options"),
    [
        ("g7e.2xlarge", {}),
        ("g6.xlarge", {"tensor_parallel_size": 2}),  # that no machine has two is checked elsewhere
        ("g6.xlarge", {"model": "org/nobody-knows"}),
        ("c7a.large", {"model": "smollm2-135m"}),
    ],
)
def test_large_enough_or_unknown_machine_passes(instance_type: str, options: dict[str, object]) -> None:
    require_room(offer(instance_type), keys(**options))


def test_unknown_accelerator_passes() -> None:
    unknown_accelerator = Offer(
        instance_type="x", accelerator="T9", num_accelerators=1, num_vcpus=4, usd_per_hour_on_demand=1.0
    )
    require_room(unknown_accelerator, keys())


@pytest.mark.parametrize(
    "text",
    [
        f"input: s3://b/in\noutput: s3://b/out\nmodel: {MODEL}\ninstance_type: g6.xlarge\n",
        f"keys: k.json\ninstance_type: g6.xlarge\nmodels:\n- model: smollm2-135m\n- model: {MODEL}\n",
    ],
)
def test_each_model_of_a_configuration_is_checked(text: str, tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(CapacityError, match="1 x L4"):
        read_workload(path, None, max_name_length=40)
