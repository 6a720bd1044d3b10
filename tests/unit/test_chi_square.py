"""The statistics of the tests themselves: what they let pass, and what they find."""

import pytest
from chi_square import p_value, power, sharpened

NUM = 4096
SKEWED = {n: 0.5 * 0.9**n / 5 for n in range(40)}  # 1 in all but for a fiftieth; the frequent ones some twenty


def test_a_coin():
    assert p_value({"heads": 60, "tails": 40}, {"heads": 0.5, "tails": 0.5}) == pytest.approx(0.0455, abs=1e-4)
    assert p_value({"heads": 50, "tails": 50}, {"heads": 0.5, "tails": 0.5}) == 1.0
    assert p_value({"heads": 50, "edge": 50}, {"heads": 0.5}) == 1.0, "what is not known is together"
    assert p_value({"heads": 40, "edge": 60}, {"heads": 0.5}) == pytest.approx(0.0455, abs=1e-4)


def test_its_own_samples_pass_and_those_of_a_slightly_wrong_sampler_do_not():
    assert power(SKEWED, SKEWED, NUM, 0.1) == pytest.approx(0.1, abs=0.09)
    assert power(SKEWED, SKEWED, NUM, 1e-4) == 0
    assert power(SKEWED, sharpened(SKEWED, 0.8), NUM, 1e-4) > 0.98
