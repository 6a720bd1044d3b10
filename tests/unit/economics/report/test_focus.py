import csv
import io
import json
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest

from peagle.economics.report.focus import focus_csv
from peagle.economics.spending import Charge, Spend, day_number
from peagle.errors import PriceError

# FinOps Open Cost and Usage Specification 1.2: what every dataset has.
MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
    "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
    "ServiceCategory", "ServiceName",
}  # fmt: skip
MAY_BE_EMPTY = {"BillingAccountName", "ChargeClass"}


@pytest.fixture
def charge():
    return Charge(
        day=day_number(date(2026, 12, 31)), run="serve", instance="p5.4xlarge", provider="aws", region="us-east-1",
        usd_per_device_s=6.88 / 3600, model="gpt-oss-20b", drafter="head", key="alice", tags='{"team": "search"}',
        spend=Spend(attributed_usd=3.44, idle_usd=1 / 3, num_output_tokens=900_000),
    )  # fmt: skip


def rows_of(*charges):
    return list(csv.DictReader(io.StringIO(focus_csv(charges))))


def test_each_kind_of_cost_is_a_row_with_all_mandatory_columns(charge):
    work, idle = rows_of(charge)
    for row in (work, idle):
        assert row.keys() >= MANDATORY
        assert all(row[name] for name in MANDATORY - MAY_BE_EMPTY)
    assert (work["x_Kind"], work["EffectiveCost"], work["SubAccountId"]) == ("attributed", "3.440000000", "alice")
    assert (work["ConsumedQuantity"], work["ConsumedUnit"]) == ("900000", "Tokens")
    assert float(work["PricingQuantity"]) == pytest.approx(0.5)
    assert (work["PricingUnit"], work["ListUnitPrice"]) == ("Device-Hours", "6.880000000")
    assert (idle["x_Kind"], idle["ConsumedQuantity"]) == ("idle", "")
    assert json.loads(work["Tags"]) == {"team": "search"}


def test_periods_are_days_of_a_month_and_end_where_the_next_begin(charge):
    row = rows_of(charge)[0]
    assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == ("2026-12-31T00:00:00Z", "2027-01-01T00:00:00Z")
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == ("2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")


def test_rows_of_one_payer_and_day_are_one_and_all_add_up_to_the_last_digit(charge):
    other = replace(charge, key="bob", spend=Spend(attributed_usd=1 / 3, loading_usd=2 / 3))
    rows = rows_of(charge, charge, other)
    assert [(row["SubAccountId"], row["x_Kind"]) for row in rows] == [
        ("alice", "attributed"), ("alice", "idle"), ("bob", "attributed"), ("bob", "loading"),
    ]  # fmt: skip
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal("8.546666667")


def test_a_batch_is_priced_by_its_requests(charge):
    (row,) = rows_of(replace(charge, usd_per_device_s=0.0, spend=Spend(attributed_usd=3.0, num_requests=7)))
    assert (row["PricingUnit"], row["PricingQuantity"], row["ListUnitPrice"]) == ("Requests", "7", "")


def test_an_unknown_cost_is_an_error_and_no_row(charge):
    with pytest.raises(PriceError, match="FOCUS has no unknown cost"):
        rows_of(replace(charge, spend=Spend(is_priced=False)))
