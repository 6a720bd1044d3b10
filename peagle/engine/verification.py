"""Decide how many drafted tokens to verify, how many to draft next, and whether drafting pays at all.

Here, a draft is one draft token. It survives if it and all earlier drafts of its request are accepted. The drafter's
log-probability of a draft predicts its survival well. The drafts that are most likely to survive are verified. Their
number maximises

    expected tokens of the step - predicted seconds of the step x tokens/s of recent steps

vLLM's `adaptive_verification.py`, which only supports DSpark on GPUs, maximises the ratio of tokens to seconds for each
step. This module predicts both from the engine's earlier steps. The decision only uses facts known before
verification, so the output stays the target's: the rejection sampler is exact for any number of drafts that does not
depend on the sampler's random numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_MAX_LOG_ODDS = 6.0  # so that one surprise does not dominate a fit
_DECAY = 0.999  # factor by which each observation reduces the weight of earlier ones, so that a fit follows changes
_SPEED_EXPONENT = 0.2  # the machine's speed follows this power of a step's seconds / predicted seconds
# Limits of that ratio, since a step that another process interrupted is not this engine's cost. The first observations
# of a cost have a wider limit.
_MIN_RATIO, _MAX_RATIO, _FIRST_MAX_RATIO = 0.1, 1.2, 3.0
_PLAIN_WEIGHT = 8.0  # of the few steps without drafts in a fit, because they decide whether drafting pays
_GAIN_WINDOW = 1024  # requests x steps over which the gain of drafting is averaged, but at least 16 steps
# A trial: steps with drafts at a load before drafting may pause. The first ones only learn the costs of steps, then the
# gain is averaged over some steps, more with few requests.
_FIRST_TRIAL_STEPS, _TRIAL_REQUESTS = 16, 64
_MIN_GAIN = 1.02  # below that, the error of the estimate is larger than the gain
_FIRST_MARGIN = 6.0  # / (requests x steps): how much lower the gain may be, because an average over few steps is noisy
_SETTLING_STEPS = 16  # steps at another load before drafting continues after a pause
# Coefficients for the first steps: the packaged target on two cores takes 23.5 ms plus 0.1 ms per token up to 16 and
# 0.4 ms per token above that; the drafter takes 7 ms
# (benchmarks/speculation/2026-11-27-smollm2-135m-amx-shipped.md).
_TARGET_SHAPE = np.array([1.0, 0.005, 0.012, 0.05])
_DRAFTER_SHAPE = np.array([0.2, 0.02, 0.005, 0.03, 0.003])
_RETRY_S = 30.0  # pause until drafting is retried; doubles up to `_MAX_RETRY_S` while drafting does not pay
_MAX_RETRY_S = 480.0


class Calibration:
    """The probability that a draft is accepted if all earlier ones are: a logistic regression for each position.

    Starts with the drafter's own probability, which is nearly calibrated because training minimises the divergence
    from the target's probability.
    """

    def __init__(self, num_positions: int) -> None:
        self._weights = np.tile([0.0, 1.0], (num_positions, 1))  # intercept, and factor of the drafter's log-odds
        self._information = np.tile(np.diag([4.0, 16.0]), (num_positions, 1, 1))  # prior: about 16 observations

    def probabilities(self, log_odds: Array) -> Array:
        """Return the probabilities for the drafter's log-odds [requests, positions]."""
        return np.asarray(1 / (1 + np.exp(-(self._weights[:, 0] + self._weights[:, 1] * log_odds))))

    def observe(self, log_odds: Array, is_judged: Mask, is_accepted: Mask) -> None:
        """Learn from drafts [requests, positions]; `is_judged` marks those that the target accepted or rejected."""
        probability = self.probabilities(log_odds)
        errors = (is_accepted - probability) * is_judged
        spread = probability * (1 - probability) * is_judged
        fade = _DECAY ** is_judged.sum(axis=0)
        features = np.stack([np.ones_like(log_odds), log_odds], axis=-1)
        self._information *= fade[:, None, None]
        self._information += np.einsum("rk,rki,rkj->kij", spread, features, features) + 1e-3 * np.eye(2)
        gradient = np.einsum("rk,rki->ki", errors, features)
        self._weights += np.linalg.solve(self._information, gradient[..., None])[..., 0]


class LinearCost:
    """Seconds as a linear function of features: non-negative least squares with exponential forgetting.

    Coefficients that the observed features do not determine return to their expected values.

    Args:
        shape: expected coefficients, up to a common factor, which the first observation determines.
        factor: the expected factor.
    """

    def __init__(self, shape: Array, factor: float = 1.0) -> None:
        self._weights: Array = shape * factor
        self._expected = self._weights.copy()
        # A coefficient's prior standard deviation is three times its expected size, if observations have 10 % noise.
        self._prior: Array = np.diag((0.1 / (3 * shape)) ** 2)
        self._information = self._prior.copy()
        self._moments: Array = self._prior @ self._weights
        self._num_observed = 0

    def predict(self, features: Array) -> Array:
        """Return the seconds for features [..., number of coefficients], at least a microsecond."""
        return np.maximum(features @ self._weights, 1e-6)

    def observe(self, features: Array, seconds: float, weight: float = 1.0) -> float:
        """Learn the seconds for one vector of features; `weight` is the number of steps that it stands for.

        Return the ratio of `seconds` to the predicted seconds, within limits.
        """
        if self._num_observed == 0:
            self._expected *= seconds / float(self.predict(features))
            self._weights, self._moments = self._expected.copy(), self._prior @ self._expected
        self._num_observed += 1
        predicted_s = float(self.predict(features))
        max_ratio = _FIRST_MAX_RATIO if self._num_observed <= _FIRST_TRIAL_STEPS else _MAX_RATIO
        ratio = min(max(seconds / predicted_s, _MIN_RATIO), max_ratio)
        prior_weight = 1 - _DECAY
        self._information = _DECAY * self._information + prior_weight * self._prior
        self._information += weight * np.outer(features, features)
        self._moments = _DECAY * self._moments + prior_weight * self._prior @ self._expected
        self._moments += weight * ratio * predicted_s * features
        self._weights = _solve_non_negative(self._information, self._moments)
        return ratio


def _solve_non_negative(matrix: Array, moments: Array) -> Array:
    """Solve `matrix @ x = moments`; negative coefficients are set to zero, and the others are solved again."""
    solution: Array = np.zeros_like(moments)
    positive = np.ones(len(moments), dtype=bool)
    while True:
        solution[positive] = np.linalg.solve(matrix[np.ix_(positive, positive)], moments[positive])
        if (solution >= 0).all():
            return solution
        positive &= solution > 0
        solution[~positive] = 0.0


class PromptCost:
    """The drafter's seconds for prompts, per output token of their requests."""

    def __init__(self) -> None:
        self._seconds, self._tokens = MovingMean(16), MovingMean(16)  # of a step
        self._prompt_tokens, self._max_tokens, self._output_tokens = MovingMean(64), MovingMean(64), MovingMean(64)

    @property
    def seconds_per_output_token(self) -> float:
        # Short responses are the first to end, so the first responses are not representative.
        has_sample = self._output_tokens.num_values >= 16
        output_tokens = self._output_tokens.mean if has_sample else self._max_tokens.mean
        seconds_per_token = self._seconds.mean / max(1.0, self._tokens.mean)
        return seconds_per_token * self._prompt_tokens.mean / max(1.0, output_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._seconds.add(seconds)
        self._tokens.add(num_tokens)

    def start_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self._prompt_tokens.add(num_prompt_tokens)
        self._max_tokens.add(max_tokens)

    def end_request(self, num_output_tokens: int) -> None:
        self._output_tokens.add(num_output_tokens)


class MovingMean:
    """The mean of all values; once there are more than `memory`, of about the last `memory` values."""

    def __init__(self, memory: int) -> None:
        self._memory, self.num_values, self.mean = memory, 0, 0.0

    def add(self, value: float) -> None:
        self.num_values += 1
        self.mean += (value - self.mean) / min(self.num_values, self._memory)


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """What determines the duration of a decoding step.

    Attributes:
        num_requests: requests that each get at least one token.
        num_verified: drafted tokens to verify.
        context_tokens: tokens in the caches of these requests.
        depth: how many tokens the drafter then drafts for each request.
    """

    num_requests: int
    num_verified: int
    context_tokens: int
    depth: int


@dataclass(slots=True)
class LoadState:
    """The statistics of steps with about the same number of requests, up to a factor of two.

    Attributes:
        depth: how many tokens to draft for each request.
        target_cost, drafter_cost: the costs of steps, which are linear only within a factor of two.
        tokens, plain_tokens: per request: expected tokens of a step, and tokens without drafts in the time of that
            step; means over recent steps.
        num_trial_steps: steps with drafts since the last pause.
        retry_at: end of the pause in seconds; 0 if drafting is not paused.
    """

    depth: int
    net_tokens: Array  # by depth: mean over `num_steps`
    target_cost: LinearCost
    drafter_cost: LinearCost
    num_steps: int = 0
    tokens: float = 1.0
    plain_tokens: float = 1.0
    plain_tokens_per_s: float = 0.0
    num_trial_steps: int = 0
    retry_s: float = _RETRY_S
    retry_at: float = 0.0

    @property
    def gain(self) -> float:
        """The ratio of tokens/s with drafts to tokens/s without in decoding, smoothed over steps."""
        return self.tokens / self.plain_tokens


class DraftBudget:
    """Chooses the drafts to verify and the depth of the next drafts, for the requests of one engine.

    Args:
        num_speculative_tokens: K, the maximum number of drafts of a request.
        is_depth_fixed: whether the drafter always drafts K tokens.

    Attributes:
        prompt_cost: the drafter's time for prompts.
        explored_depths: how many tokens to draft for a step that verifies "nothing" or "all", only to learn from it.
    """

    def __init__(self, num_speculative_tokens: int, *, is_depth_fixed: bool = False) -> None:
        self._max_depth = num_speculative_tokens
        self._depths = [self._max_depth] if is_depth_fixed else list(range(1, self._max_depth + 1))
        self.explored_depths = {"nothing": self._depths[0], "all": self._max_depth}
        self._loads: dict[int, LoadState] = {}
        self._num_unpaused_steps = _SETTLING_STEPS  # since the last step at a paused load
        self._survival_ratios = np.full(self._max_depth, 0.8)  # survival at each position / at the position before
        sources = ("greedy", "sampled", "lookup")
        self._calibrations = {source: Calibration(num_speculative_tokens) for source in sources}
        self._shape_s: float | None = None  # seconds of the first step / seconds by `_TARGET_SHAPE`
        # Recent measured step time / predicted step time. The speed of a machine that others share changes within
        # seconds, so the costs only learn the relation between steps.
        self._slowness = 1.0
        self.prompt_cost = PromptCost()

    def load(self, num_requests: int) -> LoadState:
        """Return the statistics of steps with about this number of requests."""
        size = num_requests.bit_length()
        if size not in self._loads:
            target_cost, drafter_cost = (
                LinearCost(shape, self._shape_s or 1.0) for shape in (_TARGET_SHAPE, _DRAFTER_SHAPE)
            )
            self._loads[size] = LoadState(self._max_depth, np.zeros(len(self._depths)), target_cost, drafter_cost)
        return self._loads[size]

    def survival(self, source: str, log_odds: Array) -> Array:
        """Return the probability that each draft is accepted with all earlier ones.

        Args:
            source: the kind of requests, "greedy" or "sampled".
            log_odds: [requests, K], the drafter's; NaN for a draft of the prompt lookup.
        """
        probabilities = self._calibrations[source].probabilities(log_odds)
        is_lookup = np.isnan(log_odds)
        if is_lookup.any():
            of_lookup = self._calibrations["lookup"].probabilities(np.zeros_like(log_odds))
            probabilities = np.where(is_lookup, of_lookup, probabilities)
        return np.asarray(np.cumprod(probabilities, axis=1), dtype=np.float64)

    def choose(self, survival: Array, num_requests: int, context_tokens: int, depth: int) -> Array:
        """Return the number of drafts to verify for each row of `survival`.

        Args:
            survival: [rows, K], non-increasing along a row; zero for drafts that do not exist.
            num_requests: requests of the step, including those without drafts.
            depth: how many tokens the drafter drafted for each request.
        """
        # The threshold and the gain are those of a step in which all requests have drafts. Requests without drafts (the
        # drafter's cache has a gap) are soon replaced by others, so they must not decide whether drafting pays.
        load = self.load(num_requests)
        threshold, tokens, plain_tokens = self._best_step(
            load, np.resize(survival, (num_requests, survival.shape[1])), context_tokens, depth
        )
        if depth == load.depth:  # otherwise the drafts only explore another depth
            load.num_trial_steps += 1
            num_averaged = max(1, load.num_trial_steps - _FIRST_TRIAL_STEPS)
            num_steps = min(num_averaged, max(16, _GAIN_WINDOW // num_requests))
            load.tokens += (tokens / num_requests - load.tokens) / num_steps
            load.plain_tokens += (plain_tokens / num_requests - load.plain_tokens) / num_steps
        return np.asarray((survival >= threshold).sum(axis=1), dtype=np.float64)

    def _best_step(
        self, load: LoadState, survival: Array, context_tokens: int, depth: int
    ) -> tuple[float, float, float]:
        """Return the lowest survival to verify, the step's tokens, and the tokens without drafts in the same time."""
        num_requests = len(survival)
        descending = np.sort(survival, axis=None)[::-1]
        descending = descending[: np.count_nonzero(descending)]
        tokens = num_requests + np.concatenate(([0.0], np.cumsum(descending)))
        num_verified = np.arange(len(tokens), dtype=np.float64)
        target_s = self._target_s(load, num_requests, num_verified, context_tokens)
        step_s = target_s + self._drafter_s(load, num_requests, num_verified, depth)
        load.plain_tokens_per_s = num_requests / float(target_s[0])
        # The tokens that steps without drafts would yield in the duration of this step.
        plain_tokens = step_s * load.plain_tokens_per_s
        num_best = int(np.argmax(tokens - load.gain * plain_tokens))
        threshold = float(descending[num_best - 1]) if num_best else np.inf
        return threshold, float(tokens[num_best]), float(plain_tokens[num_best])

    def choose_depth(self, survival: Array, num_requests: int, context_tokens: int, depth: int) -> None:
        """Choose the depth with the most net tokens, averaged over recent steps. Arguments as for `choose`."""
        load = self.load(num_requests)
        survival = np.resize(survival, (num_requests, survival.shape[1]))
        totals = survival.sum(axis=0)
        for position in range(1, survival.shape[1]):
            if position >= depth:
                survival[:, position] = survival[:, position - 1] * self._survival_ratios[position]
            elif totals[position - 1] > 0:
                ratio = totals[position] / totals[position - 1]
                self._survival_ratios[position] += 0.1 * (ratio - self._survival_ratios[position])
        net_tokens = []
        for tried_depth in self._depths:
            _, tokens, plain_tokens = self._best_step(load, survival[:, :tried_depth], context_tokens, tried_depth)
            # Net of the tokens that steps without drafts would yield in the same time.
            net_tokens.append((tokens - load.gain * plain_tokens) / num_requests)
        load.num_steps += 1
        load.net_tokens += (np.array(net_tokens) - load.net_tokens) / min(load.num_steps, max(4, 16 // num_requests))
        load.depth = self._depths[int(np.argmax(load.net_tokens))]

    def drafting_pays(self, num_requests: int, now_s: float) -> bool:
        """Return whether the drafter should run at this load.

        If drafting did not gain at least `_MIN_GAIN` over steps without drafts (after few steps, clearly less), it
        pauses at this load after a trial, until a retry is due.
        """
        load = self.load(num_requests)
        if now_s < load.retry_at:
            self._num_unpaused_steps = 0
            return False
        if load.retry_at:
            load.retry_at, load.num_trial_steps = 0.0, 0
        # Every change from a paused load to another one would run the drafter for a few new requests only.
        self._num_unpaused_steps += 1
        if self._num_unpaused_steps < _SETTLING_STEPS:
            return False
        if self.is_trial(num_requests):
            return True
        gain = self._overall_gain(load)
        num_averaged = num_requests * (load.num_trial_steps - _FIRST_TRIAL_STEPS)
        if gain >= _MIN_GAIN - _FIRST_MARGIN / num_averaged:
            if gain >= _MIN_GAIN and num_averaged >= _GAIN_WINDOW:
                load.retry_s = _RETRY_S
            return True
        self._num_unpaused_steps = 0
        load.retry_at = now_s + load.retry_s
        load.retry_s = min(2 * load.retry_s, _MAX_RETRY_S)
        return False

    def is_trial(self, num_requests: int) -> bool:
        """Return whether too few steps had drafts at this load to know whether drafting pays."""
        num_steps = _FIRST_TRIAL_STEPS + max(4, _TRIAL_REQUESTS // num_requests)
        return self.load(num_requests).num_trial_steps < num_steps

    def _overall_gain(self, load: LoadState) -> float:
        """The gain, including the drafter's time for prompts, which yields no tokens."""
        plain_tokens_of_prompts = self.prompt_cost.seconds_per_output_token * load.plain_tokens_per_s
        return 1 / (1 / load.gain + plain_tokens_of_prompts)

    def _target_s(self, load: LoadState, num_requests: int, num_verified: Array, context_tokens: int) -> Array:
        features = _target_features(num_requests, num_verified, context_tokens)
        return load.target_cost.predict(features) * self._slowness

    def _drafter_s(self, load: LoadState, num_requests: int, num_verified: Array, depth: int) -> Array:
        return load.drafter_cost.predict(_drafter_features(num_requests, num_verified, depth)) * self._slowness

    def observe_step(self, step: DecodingStep, *, step_s: float, drafter_s: float) -> None:
        """Learn from a step without prompt tokens.

        Args:
            step_s: seconds from the start of this step to the start of the next.
            drafter_s: the part for drafting and for choosing drafts; 0 if the drafter did not run.
        """
        num_verified = np.float64(step.num_verified)
        features = _target_features(step.num_requests, num_verified, step.context_tokens)
        target_s = max(step_s - drafter_s, 0.0) / self._slowness
        if self._shape_s is None:
            self._shape_s = target_s / float(features @ _TARGET_SHAPE)
            self._loads.clear()  # their costs were not in seconds, and a cold engine's first steps say little
        load = self.load(step.num_requests)
        ratio = load.target_cost.observe(features, target_s, 1.0 if step.num_verified else _PLAIN_WEIGHT)
        if drafter_s > 0:
            features = _drafter_features(step.num_requests, num_verified, step.depth)
            load.drafter_cost.observe(features, drafter_s / self._slowness)
        self._slowness *= ratio**_SPEED_EXPONENT

    def observe_prompts(self, step: DecodingStep, num_prompt_tokens: int, drafter_s: float) -> None:
        """Learn from a step that decodes and also computes prompt tokens."""
        load, num_verified = self.load(step.num_requests), np.array([float(step.num_verified)])
        decoding_s = self._drafter_s(load, step.num_requests, num_verified, step.depth)[0]
        self.prompt_cost.observe(num_prompt_tokens, max(0.0, drafter_s - float(decoding_s)))

    def observe_drafts(self, source: str, log_odds: Array, num_verified: Array, num_accepted: Array) -> None:
        """Learn from verified drafts: from the accepted ones, and from the first rejected one of each request.

        Args:
            source: as for `survival`.
            log_odds: [requests, K]; NaN for a draft of the prompt lookup.
            num_verified, num_accepted: [requests].
        """
        position = np.arange(log_odds.shape[1])
        is_accepted = position < num_accepted[:, None]
        is_judged = (position <= num_accepted[:, None]) & (position < num_verified[:, None])
        is_lookup = np.isnan(log_odds)
        self._calibrations[source].observe(np.nan_to_num(log_odds), is_judged & ~is_lookup, is_accepted)
        if is_lookup.any():
            self._calibrations["lookup"].observe(np.zeros_like(log_odds), is_judged & is_lookup, is_accepted)


def log_odds(log_probabilities: Array) -> Array:
    """Return log(p / (1 - p)) for log(p), within +-6."""
    odds = log_probabilities - np.log(-np.expm1(np.minimum(log_probabilities, -1e-6)))
    return np.asarray(np.clip(odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS))


def _target_features(num_requests: int, num_verified: Any, context_tokens: int) -> Array:
    num_tokens = num_requests + num_verified
    features = (np.ones_like(num_tokens), num_tokens, np.maximum(0.0, num_tokens - 16))  # as in `_TARGET_SHAPE`
    return np.stack([*features, np.full_like(num_tokens, context_tokens / 1024)], axis=-1)


def _drafter_features(num_requests: int, num_verified: Any, depth: int) -> Array:
    ones, more_depths = np.ones_like(num_verified), (depth - 1) * np.ones_like(num_verified)
    return np.stack([ones, num_requests * ones, num_verified, more_depths, num_requests * more_depths], axis=-1)
