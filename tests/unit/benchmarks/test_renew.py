import os
import subprocess

import pytest

from benchmarks.prices.renew import offers_csv, renew
from peagle.economics.prices import PriceTable, read_offers

HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"
DAY = "2027-01-02"


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    env = {**os.environ, "GIT_COMMITTER_DATE": f"{DAY}T00:00:00Z"}
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, env=env)


@pytest.fixture
def clone(tmp_path):
    """A catalogue with two versions; the newest has c7a.large in three zones."""
    folder = tmp_path / "catalogue"
    old, new = (folder / "catalogs" / version / "aws" / "vms.csv" for version in ("v9", "v10"))
    for file in (old, new):
        file.parent.mkdir(parents=True)
    old.write_text(HEAD + "c7a.large,,,2.0,4.0,,9,9,us-east-1,a\n")
    zones = zip("abc", ("0.05", "0.04", ""), strict=True)
    new.write_text(HEAD + "".join(f"c7a.large,,,2.0,4.0,,0.2,{spot},us-east-1,{zone}\n" for zone, spot in zones))
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "prices")
    return folder


def test_prices_come_from_the_newest_version(clone):
    (offer,) = (
        offer
        for offer in list(PriceTable.load().offers)
        if offer.place == "aws us-east-1" and offer.instance_type == "c7a.large"
    )
    (new,), missing = renew([offer], clone)
    assert (new.usd_per_hour_on_demand, new.usd_per_hour_spot, missing) == (0.2, 0.045, [])
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert new.source == f"skypilot-org/skypilot-catalog catalogs/v10/aws/vms.csv@{commit[:12]}"
    assert new.as_of == DAY
    assert (new.num_vcpus, new.memory_gib) == (offer.num_vcpus, offer.memory_gib)


def test_offers_that_are_not_in_the_catalogue_stay(clone, tmp_path):
    (tmp_path / "own.csv").write_text("instance_type,vcpus,usd_per_hour_on_demand\nrack-7,64,1.5\n")
    missing = [
        offer
        for offer in list(PriceTable.load().offers)
        if offer.provider == "aws" and offer.instance_type != "c7a.large"
    ]
    offers = [*missing, *read_offers(tmp_path / "own.csv")]
    assert renew(offers, clone) == (offers, missing)


def test_the_csv_is_a_price_table(tmp_path):
    (tmp_path / "again.csv").write_text(offers_csv(list(PriceTable.load().offers)))
    assert read_offers(tmp_path / "again.csv") == list(PriceTable.load().offers)
