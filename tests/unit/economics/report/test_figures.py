import pytest

from peagle.economics.prices import Price, PriceTable
from peagle.economics.report.figures import (
    FIGURES,
    format_duration,
    format_price,
    format_share,
    format_usd,
    saved_lines,
)
from peagle.economics.savings import Savings


@pytest.mark.parametrize(
    ("format_value", "value", "text"),
    [
        (format_usd, 0, "$0"),
        (format_usd, 5.70222e-05, "$0.0000570"),
        (format_usd, 0.1, "$0.100"),
        (format_usd, 1, "$1.00"),
        (format_usd, 98765.432, "$98,765.43"),
        (format_duration, 0, "0.0 s"),
        (format_duration, 59.94, "59.9 s"),
        (format_duration, 60, "1 min 0 s"),
        (format_duration, 3600, "1 h 0 min"),
        (format_share, 0, "0%"),
        (format_share, 0.004, "<1%"),
        (format_share, 0.006, "1%"),
        (format_share, 1, "100%"),
    ],
)
def test_values_are_formatted_with_their_units(format_value, value, text):
    assert format_value(value) == text


def test_formatted_price_names_the_devices():
    table = PriceTable.load()
    assert format_price(table.price("c7a.large").to_dict()) == (
        "$0.10264 per hour for 2 vCPUs (c7a.large, on-demand, aws us-east-1)"
    )
    assert "for 8 H100 (p5.48xlarge" in format_price(table.price("p5.48xlarge").to_dict())
    stated = Price.fixed(usd_per_hour=2, device="accelerator", num_devices=1)
    assert format_price(stated.to_dict()) == "$2 per hour for 1 accelerator (stated by the user)"


def test_report_has_every_figure(drafter_report, plain_report):
    for figure in FIGURES.values():
        assert figure.value(drafter_report) is not None, figure.name
    assert FIGURES["acceptance_length"].text(drafter_report) == "1.60"
    assert FIGURES["acceptance_length"].text(plain_report) == "-"


COUNTS = {"num_prompt_tokens": 400, "num_cached_tokens": 100}


def lines_by_name(savings):
    return dict(saved_lines(savings.to_dict(), COUNTS))


def test_savings_lines_with_error_and_unknown_part():
    savings = Savings(
        prompt_usd=1.0, generation_usd=4.0, unsplit_usd=0.5, drafted_usd=4.0, undrafted_usd=10.0, error_usd=1.0,
        uncompared_usd=0.5, num_steps=10, num_accepted_tokens=15, spot_usd=6.0, on_demand_usd=5.0,
        unpriced_spot_usd=2.0, sources=frozenset(["bench"]),
    )  # fmt: skip
    assert lines_by_name(savings) == {
        "drafter": "$6.00 ± $1.00 saved: generation cost $4.00, without a drafter $10.00; acceptance length 2.50, "
        "break-even 1.00; unknown for $0.500",
        "spot": "$1.00 lost, net of lost work: spot $6.00, on demand $5.00; unknown for $2.00",
        "cached": "100 of 400 prompt tokens (25%)",
        "prompts": "$1.00, and generation $4.00; unknown for $0.500",
    }


def test_savings_lines_without_measurements():
    lines = lines_by_name(Savings(unsplit_usd=1.0, uncompared_usd=1.0, unpriced_spot_usd=1.0))
    assert all(lines[name].startswith("unknown: ") for name in ("drafter", "spot", "prompts"))
    savings = Savings(drafted_usd=2.0, undrafted_usd=1.0, is_error_known=False, num_steps=1)
    assert lines_by_name(savings)["drafter"].startswith("$1.00 (error unknown) lost: ")
