"""Charges as rows of FOCUS 1.2, the form that tools of finance read.

FinOps Open Cost and Usage Specification, version 1.2: its mandatory columns, some further ones, and ours, which begin
with `x_`. There is no invoice: billed, effective, contracted and list cost are what the price table or the user says.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

from peagle.economics.report.spending import decimal
from peagle.economics.spending import KINDS, Charge, Spend, day_text
from peagle.economics.statement import DIGITS, in_dollars, rounded
from peagle.economics.tags import tags_from_text
from peagle.errors import PriceError

_KIND_WORDS = {
    "attributed": "committed work",
    "loading": "engines loading and compiling",
    "idle": "idle engines",
    "lost": "work that was never committed",
}
COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName",
    "ListCost", "ListUnitPrice", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "RegionId",
    "ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory",
    "SubAccountId", "SubAccountName", "Tags", "x_Kind", "x_Model", "x_Drafter", "x_InstanceType",
)  # fmt: skip


def focus_csv(charges: Iterable[Charge]) -> str:
    """A line for each day, payer, run, model and kind of cost, adding up to the whole.

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
            hint="leave out what has no price: --format table --by run,instance shows it",
        )
    units = rounded([[getattr(spend, f"{kind}_usd") for kind in KINDS] for _, spend in groups], DIGITS)
    sink = io.StringIO()
    writer = csv.DictWriter(sink, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for (whose, spend), own in zip(groups, units, strict=True):
        usd = in_dollars(own, DIGITS, is_priced=True)
        writer.writerows(_row(whose, spend, kind, usd[kind]) for kind in KINDS if usd[kind])
    return sink.getvalue().rstrip("\n")


def _row(whose: Charge, spend: Spend, kind: str, usd: float | None) -> dict[str, Any]:
    day = date.fromisoformat(day_text(whose.day))
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    tokens = spend.num_output_tokens if kind == "attributed" else None
    cost, provider = decimal(usd), whose.provider or "own hardware"
    usd_per_hour = 3600 * whose.usd_per_device_s
    # A batch is billed as one sum.
    unit, quantity = ("Device-Hours", (usd or 0.0) / usd_per_hour) if usd_per_hour else ("Requests", spend.num_requests)
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        "BillingAccountId": "peagle",
        "BillingAccountName": "peagle",
        "BillingCurrency": "USD",
        "BillingPeriodStart": _moment(month),
        "BillingPeriodEnd": _moment(next_month),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{whose.model or 'engines'}: {_KIND_WORDS[kind]}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _moment(day),
        "ChargePeriodEnd": _moment(day + timedelta(days=1)),
        "ConsumedQuantity": tokens,
        "ConsumedUnit": "Tokens" if tokens is not None else None,
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), decimal(usd_per_hour) if usd_per_hour else None),
        "PricingQuantity": quantity,
        "PricingUnit": unit,
        "InvoiceIssuerName": provider,
        "ProviderName": provider,
        "PublisherName": "peagle",
        "RegionId": whose.region or None,
        "ResourceId": whose.run,
        "ResourceName": whose.run,
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
    }


def _moment(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"
