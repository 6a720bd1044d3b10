import json
from datetime import date

import pytest

from peagle.economics.prices import (
    DEFAULT_CPU_INSTANCE,
    Price,
    PriceTable,
    default_instance,
    price_lines,
    same_accelerator,
)
from peagle.errors import PriceError


@pytest.fixture(scope="module")
def table():
    return PriceTable.load()


@pytest.fixture
def write_table(tmp_path):
    def write(text):
        path = tmp_path / "custom.csv"
        path.write_text(text)
        return path

    return write


def test_every_packaged_price_has_a_source_and_a_date(table):
    offers = table.offers
    assert len(offers) == 86
    assert {offer.provider for offer in offers} == {"aws", "gcp", "lambda", "nebius", "runpod"}
    # A source is a file and a commit.
    assert all("@" in offer.source and date.fromisoformat(offer.as_of).year == 2026 for offer in offers)


def test_price_of_a_machine_is_divided_by_its_devices(table):
    cpu, gpu = table.price(DEFAULT_CPU_INSTANCE), table.price("p5.48xlarge")
    assert (cpu.device, cpu.num_devices, cpu.accelerator, cpu.usd_per_hour) == ("vcpu", 2, None, 0.10264)
    assert cpu.usd_per_device_s == pytest.approx(0.10264 / 2 / 3600)
    assert (gpu.device, gpu.num_devices, gpu.accelerator) == ("accelerator", 8, "H100")
    assert gpu.usd_per_device_s == pytest.approx(55.04 / 8 / 3600)


def test_spot_price_without_a_region_is_the_cheapest(table):
    price = table.price("p5.48xlarge", market="spot")
    assert (price.region, price.usd_per_hour) == ("us-east-2", 14.0818)
    assert price.doubt == "spot costs $14.0818 to $18.7089 per hour, depending on the region; this is the cheapest"
    regional = table.price("p5.48xlarge", market="spot", region="us-east-1")
    assert (regional.usd_per_hour, regional.doubt) == (18.7089, "")
    assert table.price("gpu-h200-sxm_1gpu-16vcpu-200gb", market="spot").doubt == ""  # equal in all regions


def test_unknown_instance_types_get_suggestions(table):
    with pytest.raises(PriceError) as error:
        table.price("p5.48xlrage")
    assert all(name in error.value.hint for name in ("p5.48xlarge", "--usd-per-hour", "--prices"))


def test_instance_type_without_an_on_demand_price_is_an_error(table):
    with pytest.raises(PriceError, match=r"no on-demand price .* aws us-east-2 spot \$14\.8034"):
        table.price("p5e.48xlarge")


def test_custom_price_with_a_region_replaces_the_price_of_that_region(write_table):
    table = PriceTable.load(
        write_table("provider,region,instance_type,vcpus,usd_per_hour_on_demand\naws,us-east-2,c7a.large,2,0.05\n")
    )
    assert table.price("c7a.large", region="us-east-2").usd_per_hour == 0.05
    assert table.price("c7a.large", region="us-east-1").usd_per_hour == 0.10264
    with pytest.raises(
        PriceError, match=r"depends on the region: aws us-east-1 \$0\.10264, aws us-east-2 \$0\.05"
    ) as error:
        table.price("c7a.large")
    assert "region" in error.value.hint


def test_custom_price_without_a_region_replaces_all_prices_of_the_instance_type(write_table):
    table = PriceTable.load(
        write_table("instance_type,accelerator,accelerator_count,usd_per_hour_on_demand\np5.48xlarge,H100,8,40\n")
    )
    price = table.price("p5.48xlarge")
    assert (price.usd_per_hour, price.provider, price.as_of) == (40, "", "undated")
    assert price.source == "custom.csv"
    assert table.price("p5.4xlarge").usd_per_hour == 6.88


def test_reserved_prices_are_refused_in_tables_but_read_from_records(write_table, table):
    with pytest.raises(PriceError, match="unknown column 'usd_per_hour_reserved'") as error:
        PriceTable.load(write_table("instance_type,vcpus,usd_per_hour_reserved\nrack-7,64,1.5\n"))
    assert "usd_per_hour_on_demand" in error.value.hint
    recorded = table.price("p5.48xlarge", region="us-east-1").to_dict() | {"market": "reserved"}
    assert Price.from_dict(recorded).market == "reserved"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "requires the column instance_type"),
        ("instance_type,vcpu,usd_per_hour_spot\nx,1,1\n", r"(?s)unknown column 'vcpu'.*vcpus"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,1\n", "line 2: the number of fields differs"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,1,cheap\n", "line 2: could not convert"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,1,0\n", "line 2: usd_per_hour_spot must be a positive"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,1,nan\n", "line 2: usd_per_hour_spot must be a positive"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,1,\n", "must contain a price"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,,1\n", "must be at least 1"),
        ("instance_type,vcpus,usd_per_hour_spot\n,2,1\n", "instance_type is empty"),
        ("instance_type,vcpus,usd_per_hour_spot\nx,1,1\nx,1,2\n", "x has two prices for all regions"),
    ],
)
def test_invalid_tables_are_refused_with_file_and_line(write_table, text, reason):
    path = write_table(text)
    with pytest.raises(PriceError, match=reason) as error:
        PriceTable.load(path)
    assert str(path) in error.value.message


def test_unreadable_table_is_an_error(tmp_path):
    with pytest.raises(PriceError, match="cannot read the price table"):
        PriceTable.load(tmp_path / "missing.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PriceError, match="cannot read the price table"):
        PriceTable.load(binary)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"usd_per_hour": usd}, "must be positive") for usd in (0.0, -1.0, float("nan"), float("inf"))),
        ({"num_devices": 0}, "at least one device"),
        ({"device": "gpu"}, "accelerator, vcpu"),
        ({"basis": "guessed"}, "stated, detected, assumed"),
        ({"discount": 0.5}, "exactly the keys"),
        ({"usd_per_hour": "much"}, "not a price"),
    ],
)
def test_invalid_prices_are_refused(changes, message):
    with pytest.raises(PriceError, match=message):
        Price.from_dict(Price.fixed(usd_per_hour=1.0, device="vcpu", num_devices=2).to_dict() | changes)


def test_price_round_trip(table):
    price = table.price("a4-highgpu-8g")
    assert Price.from_dict(json.loads(json.dumps(price.to_dict()))) == price
    without_basis = {key: value for key, value in price.to_dict().items() if key != "basis"}
    assert Price.from_dict(without_basis) == price, "older records have no basis"


def test_default_instance_of_an_accelerator_with_one_instance_type(table):
    assert default_instance("NVIDIA B300", table) == "p6-b300.48xlarge"


@pytest.mark.parametrize(
    ("device_name", "listed", "not_listed"),
    [
        ("NVIDIA H100 80GB HBM3", "p5.48xlarge", "p5en.48xlarge"),
        ("NVIDIA A100-SXM4-80GB", "p4de.24xlarge", "p4d.24xlarge"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "g7e.2xlarge", "g6"),
    ],
)
def test_accelerator_with_several_instance_types_has_no_default(table, device_name, listed, not_listed):
    with pytest.raises(PriceError) as error:
        default_instance(device_name, table)
    _, *lines = error.value.hint.splitlines()
    names = [line.split()[0] for line in lines]
    assert f"{len(names)} instance types have it" in error.value.message
    assert listed in names
    assert not_listed not in names
    assert all(flag in error.value.hint for flag in ("--instance-type", "--usd-per-hour", "--prices"))


def test_price_lines_show_devices_price_and_provider(table):
    lines = [" ".join(line.split()) for line in price_lines(table.offers_with("NVIDIA H200"), "on_demand")]
    assert "p5en.48xlarge 8 x H200 $63.30/h on demand aws" in lines
    assert "p5e.48xlarge 8 x H200 $14.80 to $17.75/h spot aws" in lines  # has no on-demand price
    spot = [" ".join(line.split()) for line in price_lines(table.offers_with("NVIDIA H200"), "spot")]
    assert "p5en.48xlarge 8 x H200 $11.76 to $18.57/h spot aws" in spot
    assert "1x_H200-SXM_SECURE 1 x H200-SXM $4.59/h on demand runpod" in spot  # has no spot price


def test_has_accelerator_matches_device_names(table):
    assert table.has_accelerator("p5.48xlarge", "NVIDIA H100 80GB HBM3")
    assert table.has_accelerator("m7i.large", None)  # None: the engines run on CPUs
    assert not table.has_accelerator("p5.48xlarge", "NVIDIA H200")
    assert not table.has_accelerator("p5.48xlarge", None)
    assert not table.has_accelerator("m7i.large", "NVIDIA L4")
    assert not table.has_accelerator("m7i.huge", None)


@pytest.mark.parametrize(
    ("name", "device_name", "expected"),
    [
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "NVIDIA A100 80GB PCIe", True),
        ("A100-80GB", "A100-80G", True),  # Ray's name
        ("A100-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("A100", "A100", True),
        ("A100-80GB", "A100", False),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100-SXM", "NVIDIA H100 80GB HBM3", True),
        ("H100-SXM", "NVIDIA H100 PCIe", False),
        ("H200-SXM", "NVIDIA H200 NVL", False),
        ("L4", "NVIDIA L40S", False),
        ("B200", "NVIDIA GB200", False),
        ("RTXPRO6000", "RTX-PRO-6000", True),
        (None, "NVIDIA L4", False),
    ],
)
def test_accelerator_names_of_price_tables_match_device_names(name, device_name, expected):
    assert same_accelerator(name, device_name) == expected
