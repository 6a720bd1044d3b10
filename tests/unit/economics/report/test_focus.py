import csv
import io
import json
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest

from peagle.economics.report.focus import focus_csv
from peagle.economics.spending import Charge, Spend, day_number
from peagle.errors import PriceError

# Columns of FOCUS 1.2 (FinOps Open Cost and Usage Specification; specification/columns in its repository), with a
# pattern for the values: the mandatory columns, and the conditional columns that apply to these charges.
TEXT, DECIMAL, TIMESTAMP = r"\S(?:.*\S)?", r"-?\d+(?:\.\d+)?", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
UNIT = r"[A-Z][a-z]+s|[A-Z][a-z]+-(?:Hours|Seconds)"
MANDATORY = {
    "BilledCost": DECIMAL, "BillingAccountId": TEXT, "BillingAccountName": TEXT, "BillingCurrency": "[A-Z]{3}",
    "BillingPeriodEnd": TIMESTAMP, "BillingPeriodStart": TIMESTAMP, "ChargeCategory": "Usage", "ChargeClass": "",
    "ChargeDescription": TEXT, "ChargePeriodEnd": TIMESTAMP, "ChargePeriodStart": TIMESTAMP, "ContractedCost": DECIMAL,
    "EffectiveCost": DECIMAL, "InvoiceIssuerName": TEXT, "ListCost": DECIMAL, "PricingQuantity": DECIMAL,
    "PricingUnit": UNIT, "ProviderName": TEXT, "PublisherName": TEXT, "ServiceCategory": "AI and Machine Learning",
    "ServiceName": TEXT,
}  # fmt: skip
CONDITIONAL = {
    "ChargeFrequency": "Usage-Based", "ConsumedQuantity": DECIMAL, "ConsumedUnit": UNIT, "ContractedUnitPrice": DECIMAL,
    "ListUnitPrice": DECIMAL, "PricingCategory": "Standard|Dynamic|Other", "ResourceId": TEXT, "ResourceType": TEXT,
    "ServiceSubcategory": "Generative AI", "Tags": r"\{.*\}",
}  # fmt: skip
NULLABLE = {"RegionId", "RegionName", "ResourceName", "SubAccountId", "SubAccountName"}
NULL_TOGETHER = (("RegionId", "RegionName"), ("SubAccountId", "SubAccountName"))


@pytest.fixture
def charge():
    return Charge(
        day=day_number(date(2026, 12, 31)), run="serve", instance="p5.4xlarge", provider="aws", region="us-east-1",
        market="on_demand", usd_per_device_s=6.88 / 3600, model="gpt-oss-20b", drafter="head", key="alice",
        tags='{"team": "search"}',
        spend=Spend(attributed_usd=3.44, idle_usd=1 / 3, num_output_tokens=900_000),
    )  # fmt: skip


def focus_rows(*charges):
    return list(csv.DictReader(io.StringIO(focus_csv(charges))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"market": "spot", "key": "", "region": "", "tags": "{}"},
        {"spend": Spend(loading_usd=1e-9, lost_usd=1e6 / 7)},
        {"spend": Spend(attributed_usd=2 / 3), "provider": ""},  # training runs have no tokens
        {"usd_per_device_s": 0.0, "market": "", "spend": Spend(attributed_usd=100 / 3, num_requests=49_999)},
        {"usd_per_device_s": 0.0, "market": "", "spend": Spend(attributed_usd=2.0)},
    ],
    ids=["work and idling", "spot", "tiny and huge", "training", "batch", "batch without requests"],
)
def test_rows_follow_the_specification(charge, changes):
    rows = focus_rows(replace(charge, **changes))
    assert rows
    for row in rows:
        custom_columns = {name for name in row if name.startswith("x_")}
        assert row.keys() - custom_columns == MANDATORY.keys() | CONDITIONAL.keys() | NULLABLE
        assert set(list(row)[-len(custom_columns) :]) == custom_columns, "FOCUS columns come first"
        mismatched = {
            name for name, pattern in (MANDATORY | CONDITIONAL).items() if not re.fullmatch(pattern, row[name])
        }
        assert mismatched == set()
        for first, other in NULL_TOGETHER:
            assert (row[first] == "") == (row[other] == "")
        assert row["ResourceName"] != row["ResourceId"]
        assert len({row[name] for name in ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")}) == 1
        for price in ("ContractedUnitPrice", "ListUnitPrice"):
            product = Decimal(row[price]) * Decimal(row["PricingQuantity"])
            assert product == pytest.approx(Decimal(row["BilledCost"]), rel=Decimal("1e-14"), abs=Decimal("1e-15"))


def test_each_kind_of_cost_is_a_row(charge):
    work, idle = focus_rows(charge)
    assert (work["x_Kind"], work["EffectiveCost"], work["SubAccountId"]) == ("attributed", "3.440000000", "alice")
    assert (work["ConsumedQuantity"], work["ConsumedUnit"]) == ("900000", "Tokens")
    assert (work["PricingQuantity"], work["PricingUnit"], work["ListUnitPrice"]) == ("0.5", "Device-Hours", "6.88")
    assert (work["PricingCategory"], work["RegionId"], work["x_InstanceProvider"]) == ("Standard", "us-east-1", "aws")
    assert (idle["x_Kind"], idle["ConsumedUnit"]) == ("idle", "Device-Hours")
    assert idle["ConsumedQuantity"] == idle["PricingQuantity"]
    assert json.loads(work["Tags"]) == {"team": "search"}


def test_charge_period_is_a_day_and_billing_period_a_month(charge):
    row = focus_rows(charge)[0]
    assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == ("2026-12-31T00:00:00Z", "2027-01-01T00:00:00Z")
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == ("2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")


def test_rows_are_grouped_and_add_up_exactly(charge):
    other = replace(charge, key="bob", spend=Spend(attributed_usd=1 / 3, loading_usd=2 / 3))
    rows = focus_rows(charge, charge, other)
    assert [(row["SubAccountId"], row["x_Kind"]) for row in rows] == [
        ("alice", "attributed"), ("alice", "idle"), ("bob", "attributed"), ("bob", "loading"),
    ]  # fmt: skip
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal("8.546666667")


def test_batch_is_priced_per_request(charge):
    (row,) = focus_rows(replace(charge, usd_per_device_s=0.0, spend=Spend(attributed_usd=3.0, num_requests=7)))
    assert (row["PricingUnit"], row["PricingQuantity"]) == ("Requests", "7")
    assert 7 * float(row["ListUnitPrice"]) == pytest.approx(3)


def test_unknown_cost_is_an_error(charge):
    with pytest.raises(PriceError, match="FOCUS does not allow unknown costs"):
        focus_rows(replace(charge, spend=Spend(is_priced=False)))


def test_another_currency_applies_to_costs_and_prices(charge):
    work = next(csv.DictReader(io.StringIO(focus_csv([charge], "EUR", 0.5))))
    assert (work["BillingCurrency"], work["BilledCost"], work["ListUnitPrice"]) == ("EUR", "1.720000000", "3.44")
    assert work["PricingQuantity"] == "0.5"
