"""Charges as rows of FOCUS 1.2, the FinOps Open Cost and Usage Specification.

The rows have the mandatory columns, the conditional columns that apply, and custom columns that begin with `x_`. There
is no invoice: all costs come from the price table or the user. Provider, publisher and issuer are peagle, as the
appendix "Origination of Cost Data" specifies for an internal service on a cloud, so that the rows are not added to the
cloud's bill.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from peagle.economics.report.spending import decimal
from peagle.economics.spending import KINDS, Charge, Spend, day_text
from peagle.economics.statement import DIGITS, round_to_last_digit
from peagle.economics.tags import tags_from_text
from peagle.errors import PriceError

_KIND_DESCRIPTIONS = {
    "attributed": "committed work",
    "loading": "engines loading and compiling",
    "idle": "idle time",
    "lost": "work that was not committed",
}
COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName",
    "ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
    "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName",
    "ServiceSubcategory", "SubAccountId", "SubAccountName", "Tags", "x_Kind", "x_Model", "x_Drafter",
    "x_InstanceType", "x_InstanceProvider",
)  # fmt: skip


def focus_csv(charges: Iterable[Charge], currency: str = "USD", per_usd: float = 1.0) -> str:
    """Return CSV with a row per day, API key, run, model, drafter, tags and kind of cost. Their sum is the total."""
    sums: defaultdict[Charge, Spend] = defaultdict(Spend)
    for charge in charges:
        sums[replace(charge, spend=Spend())] += charge.spend
    groups = sorted(sums.items(), key=lambda pair: (pair[0].day, pair[0].run, pair[0].key, pair[0].model, pair[0].tags))
    if any(not spend.is_priced for _, spend in groups):
        raise PriceError(
            "some engines have no price in their ledger, and FOCUS does not allow unknown costs",
            hint="leave out the runs and endpoints of these engines; --format table --by run,instance shows them",
        )
    amounts = round_to_last_digit(
        [[per_usd * getattr(spend, f"{kind}_usd") for kind in KINDS] for _, spend in groups], DIGITS
    )
    sink = io.StringIO()
    writer = csv.DictWriter(sink, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for (group, spend), group_amounts in zip(groups, amounts, strict=True):
        costs = [amount / 10**DIGITS for amount in group_amounts]
        rows = [_row(group, spend, kind, cost, per_usd) for kind, cost in zip(KINDS, costs, strict=True) if cost]
        writer.writerows({**row, "BillingCurrency": currency} for row in rows)
    return sink.getvalue().rstrip("\n")


def _row(group: Charge, spend: Spend, kind: str, cost: float, per_usd: float) -> dict[str, Any]:
    day = date.fromisoformat(day_text(group.day))
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    per_hour = 3600 * group.usd_per_device_s * per_usd
    if per_hour:
        quantity, unit, unit_price = cost / per_hour, "Device-Hours", per_hour
    elif spend.num_requests:  # batches, each billed as one amount
        quantity, unit, unit_price = spend.num_requests, "Requests", cost / spend.num_requests
    else:
        quantity, unit, unit_price = 1, "Units", cost
    has_tokens = kind == "attributed" and spend.num_output_tokens > 0
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), decimal(cost)),
        "BillingAccountId": "peagle",
        "BillingAccountName": "peagle",
        "BillingPeriodStart": _timestamp(month),
        "BillingPeriodEnd": _timestamp(next_month),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{group.model or group.run}: {_KIND_DESCRIPTIONS[kind]}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _timestamp(day),
        "ChargePeriodEnd": _timestamp(day + timedelta(days=1)),
        "ConsumedQuantity": spend.num_output_tokens if has_tokens else _number(quantity),
        "ConsumedUnit": "Tokens" if has_tokens else unit,
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), _number(unit_price)),
        "PricingCategory": {"spot": "Dynamic", "": "Other"}.get(group.market, "Standard"),
        "PricingQuantity": _number(quantity),
        "PricingUnit": unit,
        **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName"), "peagle"),
        **dict.fromkeys(("RegionId", "RegionName"), group.region or None),
        "ResourceId": group.run,
        "ResourceType": "Inference",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "peagle",
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": group.key or None,
        "SubAccountName": group.key or None,
        "Tags": json.dumps(tags_from_text(group.tags)),
        "x_Kind": kind,
        "x_Model": group.model or None,
        "x_Drafter": group.drafter or None,
        "x_InstanceType": group.instance or None,
        "x_InstanceProvider": group.provider or None,
    }


def _number(value: float) -> str:
    """Format a number without an exponent, in the 15 digits that a float guarantees.

    >>> _number(3600 * (6.88 / 3600)), _number(7), _number(1e-07)
    ('6.88', '7', '0.0000001')
    """
    return format(Decimal(f"{value:.15g}"), "f")


def _timestamp(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"
