import dataclasses

import pytest

from peagle.economics.prices import Price, PriceTable
from peagle.economics.report.figures import FIGURES, format_duration, format_price, format_share, format_usd


@pytest.mark.parametrize(
    ("usd", "words"),
    [(0, "$0"), (5.70222e-05, "$0.0000570"), (0.1, "$0.100"), (1, "$1.00"), (98765.432, "$98,765.43")],
)
def test_dollars(usd, words):
    assert format_usd(usd) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (3600, "1 h 0 min")]
)
def test_durations(seconds, words):
    assert format_duration(seconds) == words


def test_a_small_share_is_not_rounded_to_nothing():
    assert [format_share(share) for share in (0, 0.004, 0.006, 1)] == ["0%", "<1%", "1%", "100%"]


def test_prices_name_their_devices():
    table = PriceTable.load()
    assert format_price(table.price("c7a.large").to_dict()) == (
        "$0.10264 per hour for 2 vCPUs (c7a.large, on-demand, aws us-east-1)"
    )
    assert "for 8 H100 (p5.48xlarge" in format_price(table.price("p5.48xlarge").to_dict())
    stated = Price.fixed(usd_per_hour=2, device="accelerator", num_devices=1)
    assert format_price(stated.to_dict()) == "$2 per hour for 1 accelerator (custom, fixed; stated)"
    assumed = dataclasses.replace(table.price("c7a.large"), basis="assumed")
    assert format_price(assumed.to_dict()).endswith("(c7a.large, on-demand, aws us-east-1; assumed)")


def test_every_figure_is_found_in_a_report(with_drafter, without_drafter):
    for figure in FIGURES.values():
        assert figure.value(with_drafter) is not None, figure.name
    assert FIGURES["acceptance_length"].text(with_drafter) == "1.60"
    assert FIGURES["acceptance_length"].text(without_drafter) == "-"
