from peagle.economics.report.figures import saved_lines
from peagle.economics.savings import Savings

COUNTS = {"num_prompt_tokens": 400, "num_cached_tokens": 100}


def lines(savings):
    return dict(saved_lines(savings.to_dict(), COUNTS))


def test_where_nothing_was_drafted_or_on_spot_nothing_is_said_of_it():
    assert lines(Savings()) == {"cached": "100 of 400 prompt tokens (25%)"}
    assert saved_lines(Savings().to_dict(), {"num_prompt_tokens": 0, "num_cached_tokens": 0}) == [
        ("cached", "0 of 0 prompt tokens")
    ]


def test_what_is_known_has_its_error_and_what_is_not_is_beside_it():
    savings = Savings(
        prompt_usd=1.0, generation_usd=4.0, unsplit_usd=0.5, drafted_usd=4.0, undrafted_usd=10.0, error_usd=1.0,
        uncompared_usd=0.5, num_drafts=10, num_accepted_tokens=15, spot_usd=6.0, on_demand_usd=5.0,
        unpriced_spot_usd=2.0, sources=frozenset(["bench"]),
    )  # fmt: skip
    assert lines(savings) == {
        "drafter": "$6.00 ± $1.00 saved: generation cost $4.00, without a drafter $10.00; acceptance length 2.50, "
        "break-even 1.00; unknown for $0.500",
        "spot": "$1.00 lost, net of lost work: spot $6.00, on demand $5.00; unknown for $2.00",
        "cached": "100 of 400 prompt tokens (25%)",
        "prompts": "$1.00, and generation $4.00; unknown for $0.500",
    }


def test_what_nobody_measured_is_unknown():
    found = lines(Savings(unsplit_usd=1.0, uncompared_usd=1.0, unpriced_spot_usd=1.0))
    assert all(found[name].startswith("unknown: ") for name in ("drafter", "spot", "prompts"))
    savings = Savings(drafted_usd=2.0, undrafted_usd=1.0, is_error_known=False, num_drafts=1)
    assert lines(savings)["drafter"].startswith("$1.00 of unknown error lost: ")
