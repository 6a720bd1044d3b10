"""The choice of the drafts to verify, against a simulated engine whose times and acceptance are known."""

import numpy as np
import pytest

from peagle.engine.verification import Calibration, DecodingStep, DraftBudget, LinearCost, log_odds

K = 7


class SimulatedEngine:
    """Accepts each draft with 95 % of the drafter's probability. A target step takes 23 ms plus time per token.

    Args:
        token_ms: duration of each token after the first 16.
    """

    def __init__(self, num_requests, token_ms):
        self._random = np.random.default_rng(0)
        self._num_requests, self._token_ms = num_requests, token_ms

    def draft(self):
        """Return the drafter's probabilities [requests, K]."""
        return self._random.beta(2, 1.2, size=(self._num_requests, K)).clip(0.02, 0.98) * np.linspace(1, 0.6, K)

    def verify(self, probabilities, num_verified):
        """Return the accepted tokens by request, and the seconds of the target and the drafter."""
        is_accepted = self._random.random(probabilities.shape) < 0.95 * probabilities
        num_accepted = np.minimum(np.cumprod(is_accepted, axis=1).sum(axis=1), num_verified)
        num_tokens = self._num_requests + num_verified.sum()
        target_ms = 23 + 0.1 * min(num_tokens, 16) + self._token_ms * max(0, num_tokens - 16)
        drafter_ms = 5 + 0.3 * self._num_requests + 0.1 * num_verified.sum()
        noise = self._random.normal(1, 0.05, size=2)
        return num_accepted.astype(int), target_ms / 1000 * noise[0], drafter_ms / 1000 * noise[1]


def simulate(num_requests, token_ms, k=None, num_steps=900):
    """Return tokens/s after 100 warm-up steps, and the budget. Without `k`, the budget chooses the drafts to verify."""
    engine, budget = SimulatedEngine(num_requests, token_ms), DraftBudget(K, is_depth_fixed=True)
    num_tokens, total_s = 0, 0.0
    for number in range(num_steps):
        probabilities = engine.draft()
        odds = log_odds(np.log(probabilities))
        if k is None:
            num_verified = budget.choose(budget.survival("greedy", odds), num_requests, 200 * num_requests, K)
        else:
            num_verified = np.full(num_requests, k)
        num_accepted, target_s, drafter_s = engine.verify(probabilities, num_verified)
        budget.observe_drafts("greedy", odds, num_verified, num_accepted)
        step = DecodingStep(num_requests, int(num_verified.sum()), 200 * num_requests, K)  # contexts of 200 tokens
        budget.observe_step(step, step_s=target_s + drafter_s, drafter_s=drafter_s)
        if number >= 100:
            num_tokens += num_requests + num_accepted.sum()
            total_s += target_s + (drafter_s if k != 0 else 0)
    return num_tokens / total_s, budget


@pytest.mark.parametrize(("num_requests", "min_ratio"), [(1, 0.98), (4, 1.0), (8, 1.02)])
def test_choice_is_as_fast_as_the_best_fixed_k(num_requests, min_ratio):
    best = max(simulate(num_requests, 0.4, k)[0] for k in range(K + 1))
    chosen, budget = simulate(num_requests, 0.4)
    assert chosen >= min_ratio * best
    assert budget.drafting_pays(num_requests, 0.0)


@pytest.mark.parametrize(("drafter_ms_per_depth", "depth"), [(0.0, K), (24.0, 1)])
def test_depth_follows_the_cost_of_drafting(drafter_ms_per_depth, depth):
    budget, odds = DraftBudget(K), np.full((8, K), np.log(9))  # each draft token has a 90 % chance to be accepted
    for number in range(400):
        every = 8 if number < 24 else 144
        drafted = 1 if number % every == every - 1 else K if number % (2 * every) == 3 else budget.load(8).depth
        survival = budget.survival("greedy", odds)
        survival[:, drafted:] = 0.0
        num_verified = int(budget.choose(survival, 8, 1600, drafted).sum())
        budget.choose_depth(survival, 8, 1600, drafted)
        drafter_s = (2 + drafter_ms_per_depth * (drafted - 1)) / 1000
        target_s = (23 + 0.4 * num_verified) / 1000
        step = DecodingStep(8, num_verified, 1600, drafted)
        budget.observe_step(step, step_s=target_s + drafter_s, drafter_s=drafter_s)
    assert budget.load(8).depth == depth


def test_drafter_pauses_if_drafting_for_prompts_takes_longer_than_drafts_save():
    _, budget = simulate(8, 0.4)
    step = DecodingStep(8, 8, 1600, K)
    for _ in range(16):
        budget.prompt_cost.start_request(num_prompt_tokens=1000, max_tokens=100)
        budget.observe_prompts(step, 1000, drafter_s=0.02)
    assert budget.drafting_pays(8, now_s=0.0)
    for _ in range(16):
        budget.observe_prompts(step, 1000, drafter_s=2.0)
    assert not budget.drafting_pays(8, now_s=0.0)
    budget = simulate(8, 0.4)[1]
    for _ in range(16):
        budget.prompt_cost.start_request(num_prompt_tokens=1000, max_tokens=100)
        budget.observe_prompts(step, 1000, drafter_s=2.0)
        budget.prompt_cost.end_request(num_output_tokens=20_000)
    assert budget.drafting_pays(8, now_s=0.0)  # responses are long


def test_drafter_pauses_when_steps_without_drafts_are_faster():
    _, budget = simulate(32, 1.5)
    assert not budget.drafting_pays(32, now_s=100.0)
    assert not budget.drafting_pays(40, now_s=129.0)
    pays_at_lower_load = [budget.drafting_pays(16, now_s=129.0) for _ in range(17)]
    assert pays_at_lower_load == [False] * 15 + [True] * 2
    assert not budget.drafting_pays(32, now_s=129.0)  # and returns before the retry


def test_small_loss_pauses_the_drafter_only_after_many_steps():
    _, budget = simulate(8, 0.4)
    load = budget.load(8)
    load.tokens = load.plain_tokens  # neither gain nor loss
    load.num_trial_steps = 24
    assert budget.drafting_pays(8, now_s=0.0)
    load.num_trial_steps = 80
    assert not budget.drafting_pays(8, now_s=0.0)
    # After the retry, some steps with a small loss do not make the next pause shorter.
    assert [budget.drafting_pays(8, now_s=30.0) for _ in range(16)][-1]
    load.num_trial_steps = 24
    assert budget.drafting_pays(8, now_s=32.0)
    load.num_trial_steps = 80
    assert not budget.drafting_pays(8, now_s=34.0)
    assert not any(budget.drafting_pays(8, now_s=93.0) for _ in range(16))
    assert any(budget.drafting_pays(8, now_s=94.0) for _ in range(17))


def test_drafter_does_not_run_if_the_load_alternates_with_a_paused_load():
    _, budget = simulate(32, 1.5)
    assert not any(budget.drafting_pays(num_requests, now_s=100.0) for _ in range(50) for num_requests in (32, 31, 30))


def test_another_load_is_tried_before_drafting_pauses():
    _, budget = simulate(32, 1.5)
    assert budget.drafting_pays(8, now_s=0.0)


def test_paused_drafter_is_tried_again_less_and_less_often():
    _, budget = simulate(32, 1.5)
    assert not budget.drafting_pays(32, now_s=0.0)
    assert any(budget.drafting_pays(32, now_s=30.0) for _ in range(16))
    odds = np.full((32, K), -4.0)
    for _ in range(100):
        budget.choose(budget.survival("greedy", odds), 32, 6400, K)
    assert not budget.drafting_pays(32, now_s=40.0)
    assert not budget.drafting_pays(32, now_s=99.0)
    assert any(budget.drafting_pays(32, now_s=100.0) for _ in range(16))


def test_missing_drafts_are_not_chosen():
    budget = DraftBudget(3)
    survival = np.array([[0.99, 0.98, 0.0], [0.0, 0.0, 0.0]])
    assert budget.choose(survival, 2, 100, 3).tolist() == [2, 0]


def test_lookup_drafts_have_their_own_calibration():
    budget = DraftBudget(2)
    odds = np.array([[2.0, np.nan]] * 50)  # nan: copied by the lookup
    for _ in range(10):
        budget.observe_drafts("greedy", odds, np.full(50, 2), np.full(50, 1))  # every copy is rejected
    head_survival = budget.survival("greedy", np.array([[2.0, 2.0]]))[0]
    lookup_survival = budget.survival("greedy", np.array([[2.0, np.nan]]))[0]
    assert lookup_survival[1] < 0.1 < head_survival[1]


def test_calibration_approaches_observed_rates():
    random, calibration = np.random.default_rng(1), Calibration(1)
    for _ in range(300):
        odds = random.normal(0, 2, size=(16, 1))
        is_accepted = random.random(odds.shape) < 1 / (1 + np.exp(-(0.5 * odds - 1)))
        calibration.observe(odds, np.ones_like(odds, dtype=bool), is_accepted)
    predicted = calibration.probabilities(np.array([[-2.0], [0.0], [2.0]]))[:, 0]
    assert predicted == pytest.approx([0.119, 0.269, 0.5], abs=0.04)


def test_cost_is_learned_despite_interrupted_steps():
    random, cost = np.random.default_rng(2), LinearCost(np.array([1.0, 0.01]))
    for number in range(800):
        num_tokens = float(random.integers(1, 60))
        seconds = 0.1 + 0.002 * num_tokens + (1.0 if number % 50 == 49 else 0.0)
        cost.observe(np.array([1.0, num_tokens]), seconds * random.normal(1, 0.03))
    predicted = cost.predict(np.array([[1.0, 1.0], [1.0, 50.0]]))
    assert predicted == pytest.approx([0.102, 0.2], rel=0.12)


def test_cost_relative_to_plain_steps_is_learned_although_they_are_rare_and_the_speed_changes():
    random, budget = np.random.default_rng(3), DraftBudget(K)
    for number in range(64):
        num_verified = 0 if number % 8 == 0 else int(random.integers(60, 100))
        slowness = 1 + 0.25 * np.sin(number / 10)
        step = DecodingStep(32, num_verified, 4096 + 64 * number, 0)
        budget.observe_step(step, step_s=slowness * (0.024 + 0.001 * (32 + num_verified)), drafter_s=0.0)
    features = np.array([[1.0, num_tokens, num_tokens - 16, 8.0] for num_tokens in (32.0, 112.0)])
    plain_s, drafted_s = budget.load(32).target_cost.predict(features)
    assert drafted_s / plain_s == pytest.approx(136 / 56, rel=0.1)


def test_cost_is_linear_only_within_a_load():
    """A step of one request takes 20 ms plus 0.2 ms per token; one of 8 requests 30 ms plus 1 ms per token."""
    random, budget = np.random.default_rng(4), DraftBudget(K)
    for number in range(400):
        num_requests, base_ms, token_ms = ((1, 20, 0.2), (8, 30, 1.0))[number // 50 % 2]
        num_verified = int(random.integers(0, K + 1)) * num_requests
        step = DecodingStep(num_requests, num_verified, 200 * num_requests, K)
        budget.observe_step(step, step_s=(base_ms + token_ms * (num_requests + num_verified)) / 1000, drafter_s=0.0)
    for num_requests, base_ms, token_ms in ((1, 20, 0.2), (8, 30, 1.0)):
        features = np.array([1.0, num_requests, 0.0, 200 * num_requests / 1024])
        plain_s = budget.load(num_requests).target_cost.predict(features)
        drafted_s = budget.load(num_requests).target_cost.predict(features + np.array([0.0, num_requests, 0.0, 0.0]))
        expected = 1 + token_ms * num_requests / (base_ms + token_ms * num_requests)
        assert drafted_s / plain_s == pytest.approx(expected, rel=0.005)


def test_log_odds_are_limited():
    assert log_odds(np.array([0.0, -np.log(2), -100.0])).tolist() == pytest.approx([6.0, 0.0, -6.0])
