"""Charges as rows of FOCUS 1.2, the form that tools of finance read.

FinOps Open Cost and Usage Specification, version 1.2: its mandatory columns, the conditional ones that apply, and ours,
which begin with `x_`. There is no invoice: billed, effective, contracted and list cost are what the price table or the
user says. Provider, publisher and issuer are peagle, as its appendix "Origination of Cost Data" has it for an internal
service on a cloud; so nobody adds these rows to the cloud's own bill.
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
from peagle.economics.statement import DIGITS, rounded
from peagle.economics.tags import tags_from_text
from peagle.errors import PriceError

_KIND_WORDS = {
    "attributed": "committed work",
    "loading": "engines loading and compiling",
    "idle": "idle time",
    "lost": "work that was never committed",
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
_CATEGORIES = {"spot": "Dynamic", "": "Other"}  # of a market; all others have an agreed price


def focus_csv(charges: Iterable[Charge], currency: str = "USD", per_usd: float = 1.0) -> str:
    """A line for each day, payer, run, model and kind of cost, adding up to the whole.

    Args:
        currency: all amounts and prices are in, by its code of ISO 4217.
        per_usd: of it for a dollar.

    Raises:
        PriceError: a charge has no price, and the specification knows no unknown cost.
    """
    sums: defaultdict[Charge, Spend] = defaultdict(Spend)
    for charge in charges:
        sums[replace(charge, spend=Spend())] += charge.spend
    groups = sorted(sums.items(), key=lambda one: (one[0].day, one[0].run, one[0].key, one[0].model, one[0].tags))
    if any(not spend.is_priced for _, spend in groups):
        raise PriceError(
            "some engines have no price in their ledger, and FOCUS has no unknown cost",
            hint="leave out rows without a price: --format table --by run,instance shows it",
        )
    units = rounded([[per_usd * getattr(spend, f"{kind}_usd") for kind in KINDS] for _, spend in groups], DIGITS)
    sink = io.StringIO()
    writer = csv.DictWriter(sink, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for (whose, spend), own in zip(groups, units, strict=True):
        costs = [unit / 10**DIGITS for unit in own]
        rows = [_row(whose, spend, kind, cost, per_usd) for kind, cost in zip(KINDS, costs, strict=True) if cost]
        writer.writerows({**row, "BillingCurrency": currency} for row in rows)
    return sink.getvalue().rstrip("\n")


def _row(whose: Charge, spend: Spend, kind: str, cost: float, per_usd: float) -> dict[str, Any]:
    day = date.fromisoformat(day_text(whose.day))
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    per_hour = 3600 * whose.usd_per_device_s * per_usd
    if per_hour:
        quantity, unit, unit_price = cost / per_hour, "Device-Hours", per_hour
    elif spend.num_requests:  # of batches, each billed as one sum
        quantity, unit, unit_price = spend.num_requests, "Requests", cost / spend.num_requests
    else:
        quantity, unit, unit_price = 1, "Units", cost
    has_tokens = kind == "attributed" and spend.num_output_tokens > 0
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), decimal(cost)),
        "BillingAccountId": "peagle",
        "BillingAccountName": "peagle",
        "BillingPeriodStart": _moment(month),
        "BillingPeriodEnd": _moment(next_month),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{whose.model or whose.run}: {_KIND_WORDS[kind]}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _moment(day),
        "ChargePeriodEnd": _moment(day + timedelta(days=1)),
        "ConsumedQuantity": spend.num_output_tokens if has_tokens else _number(quantity),
        "ConsumedUnit": "Tokens" if has_tokens else unit,
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), _number(unit_price)),
        "PricingCategory": _CATEGORIES.get(whose.market, "Standard"),
        "PricingQuantity": _number(quantity),
        "PricingUnit": unit,
        **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName"), "peagle"),
        **dict.fromkeys(("RegionId", "RegionName"), whose.region or None),
        "ResourceId": whose.run,
        "ResourceType": "Inference",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "peagle",
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": whose.key or None,
        "SubAccountName": whose.key or None,
        "Tags": json.dumps(tags_from_text(whose.tags)),
        "x_Kind": kind,
        "x_Model": whose.model or None,
        "x_Drafter": whose.drafter or None,
        "x_InstanceType": whose.instance or None,
        "x_InstanceProvider": whose.provider or None,
    }


def _number(value: float) -> str:
    """A number in digits without an exponent, the 15 that a float is sure of.

    >>> _number(3600 * (6.88 / 3600)), _number(7), _number(1e-07)
    ('6.88', '7', '0.0000001')
    """
    return format(Decimal(f"{value:.15g}"), "f")


def _moment(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"
