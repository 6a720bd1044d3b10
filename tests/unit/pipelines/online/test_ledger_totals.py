import pytest

from peagle.speculation import SpeculationStats
from pipelines.online.totals import TokenPrice
from tests.unit.pipelines.online.ledgers import a_request


def price_of(*requests):
    price = TokenPrice()
    for one in requests:
        price.update(one)
    return price


def test_prompt_and_output_have_prices_of_their_own():
    price = price_of(a_request())
    assert price.usd_per_prompt_token == pytest.approx(0.2 * 0.01 / 100)
    assert price.usd_per_output_token == pytest.approx(2 * 0.01 / 40)
    assert price.of(prompt_tokens=1000, output_tokens=10) == pytest.approx(0.02 + 0.005)


@pytest.mark.parametrize(
    "cheap",
    [
        {"busy_s": 0.275, "usd": 0.00275},  # one of eight at once, which each paid an eighth
        {"num_output_tokens": 328, "num_choices": 8},
        {
            "num_output_tokens": 81,
            "speculation": SpeculationStats(num_drafts=40, num_draft_tokens=120, accepted_per_position=(40, 0, 0)),
        },
        {"num_prompt_tokens": 1100, "num_cached_tokens": 1000},
    ],
    ids=["at once", "choices", "drafts", "cached"],
)
def test_what_makes_a_request_cheap_does_not_lower_the_price(cheap):
    """The attack: a hundred requests that cost little, then the whole budget at once on those that do not."""
    price, usual = price_of(*[a_request(**cheap)] * 100), price_of(a_request())
    assert price.usd_per_output_token == pytest.approx(usual.usd_per_output_token)
    assert price.usd_per_prompt_token == pytest.approx(usual.usd_per_prompt_token)


def test_many_choices_of_one_token_each_do_not_make_tokens_free():
    first_only = {"num_output_tokens": 10, "num_choices": 10, "busy_s": 0.2, "finished_at": 1000.2, "usd": 0.002}
    assert price_of(*[a_request(**first_only)] * 100).usd_per_output_token >= price_of(a_request()).usd_per_output_token
    mixed = price_of(*[a_request(**first_only)] * 100, a_request())
    assert mixed.usd_per_output_token == pytest.approx(price_of(a_request()).usd_per_output_token)


def test_long_prompts_make_outputs_no_dearer():
    long = a_request(num_prompt_tokens=10_000, ttft_s=20.0, finished_at=1022.0, busy_s=22.0, usd=0.22)
    assert price_of(long).usd_per_output_token == pytest.approx(0.0005)
    assert price_of(long).usd_per_prompt_token == pytest.approx(0.00002)


def test_beside_others_tokens_cost_what_requests_have_paid():
    price = price_of(a_request(busy_s=0.55, usd=0.0055))  # three others beside it: a quarter of its 2.2 s
    assert price.shared_price(prompt_tokens=100, output_tokens=40) == pytest.approx(0.0055)
    alone = price_of(a_request())
    assert alone.shared_price(prompt_tokens=100, output_tokens=40) == pytest.approx(0.022)
    assert TokenPrice().shared_price(prompt_tokens=1, output_tokens=1) is None


def test_a_prompt_token_is_no_dearer_than_an_output_token():
    short = a_request(num_prompt_tokens=1)
    assert price_of(short).usd_per_prompt_token == price_of(short).usd_per_output_token
    unseen = a_request(ttft_s=None)  # nobody saw its first token: all of it counts as output
    assert price_of(unseen).usd_per_output_token == pytest.approx(2.2 * 0.01 / 41)
    assert price_of(unseen).usd_per_prompt_token == price_of(unseen).usd_per_output_token


def test_the_price_of_a_token_is_that_of_late():
    dear = a_request(finished_at=1020.2, busy_s=20.2, usd=0.202)
    price = price_of(*[dear] * 50, *[a_request()] * 200)
    assert price.usd_per_output_token == pytest.approx(0.0005, rel=0.25)


@pytest.mark.parametrize("change", [{"outcome": "failed", "usd": 0.0}, {"num_output_tokens": 0}, {"busy_s": 0.0}])
def test_a_request_that_says_nothing_makes_no_price(change):
    price = price_of(a_request(**change))
    assert not price.is_known
    assert price.of(prompt_tokens=1, output_tokens=1) is None


def test_what_costs_nothing_has_a_price_of_nothing():
    assert price_of(a_request(usd=0.0)).of(prompt_tokens=1, output_tokens=1) == 0
