import os
import subprocess

import pytest

from peagle.economics.offers import packaged_offers, read_offers
from peagle.economics.price_renewal import offers_csv, renewed
from peagle.errors import ConfigError

HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"
DAY = "2027-01-02"
OWN = "instance_type,vcpus,usd_per_hour_on_demand\nrack-7,64,1.5\n"


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    env = {**os.environ, "GIT_COMMITTER_DATE": f"{DAY}T00:00:00Z"}
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, env=env)


@pytest.fixture
def clone(tmp_path):
    """A catalogue of two versions; c7a.large has three zones in the newest."""
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


def test_prices_are_those_of_the_newest_version_with_its_commit_and_its_date(clone):
    (offer,) = (one for one in packaged_offers() if one.place == "aws us-east-1" and one.instance_type == "c7a.large")
    ((new,), missing) = (renewal := renewed([offer], clone)).offers, renewal.missing
    assert (new.usd_per_hour_on_demand, new.usd_per_hour_spot, missing) == (0.2, 0.045, ())
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert new.source == f"skypilot-org/skypilot-catalog catalogs/v10/aws/vms.csv@{commit[:12]}"
    assert new.as_of == DAY
    assert (new.num_vcpus, new.memory_gib) == (offer.num_vcpus, offer.memory_gib)


def test_what_the_catalogue_lacks_and_what_is_not_its_own_stays_as_it_was(clone, tmp_path):
    (tmp_path / "own.csv").write_text(OWN)
    gone = [one for one in packaged_offers() if one.provider == "aws" and one.instance_type != "c7a.large"]
    offers = [*gone, *read_offers(tmp_path / "own.csv")]
    renewal = renewed(offers, clone)
    assert list(renewal.offers) == offers
    assert list(renewal.missing) == gone


def test_a_table_that_is_written_is_read_again(tmp_path):
    (tmp_path / "again.csv").write_text(offers_csv(packaged_offers()))
    assert read_offers(tmp_path / "again.csv") == packaged_offers()


@pytest.mark.parametrize(
    ("provider", "table", "reason"),
    [
        ("aws", None, "no clone"),
        ("gcp", HEAD, r"no catalogs/v\*/gcp"),
        ("aws", "InstanceType,Price\n", "no column Region"),
        ("aws", HEAD + "c7a.large,,,2.0,4.0,,free,,us-east-1,a\n", "line 2: 'free' is no price"),
    ],
)
def test_a_folder_that_is_no_catalogue_is_refused(clone, tmp_path, provider, table, reason):
    folder = tmp_path if table is None else clone
    if table is not None:
        (clone / "catalogs" / "v10" / "aws" / "vms.csv").write_text(table)
    with pytest.raises(ConfigError, match=reason):
        renewed([one for one in packaged_offers() if one.provider == provider], folder)
