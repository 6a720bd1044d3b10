"""What a request may cost before anybody knows: the price of a prompt token and of an output token, learned of late.

A request pays for its share of an engine's busy seconds, so the same request costs the less the more there are beside
it, and the more of its drafts are accepted. What it costs alone, with a step for each token, is the most. That is
learned here from what requests took; the newest fifty make most of it.

    prefill     seconds until the first token, over the prompt tokens that were not cached
    decode      seconds after it, over the steps: the tokens of one choice less those that drafts brought

Worked by hand: 100 prompt tokens in 0.2 s, then 40 more tokens of one choice in 2 s, 20 of them from drafts, on an
engine of 0.01 USD a busy second. A prompt token is 0.2 x 0.01 / 100 = 0.00002 USD, an output token 2 x 0.01 / 20 =
0.001. Beside seven others the request itself paid an eighth of it.
"""

from dataclasses import dataclass

from peagle.economics.usage import RequestUsage

_KEPT = 0.98  # of what is known, with each request


@dataclass(slots=True)
class TokenPrice:
    """Of one model, on the engines that it has."""

    num_requests: float = 0.0
    usd: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: float = 0.0
    decode_s: float = 0.0
    steps: float = 0.0

    def learn(self, request: RequestUsage) -> None:
        """Another request has ended; one that made nothing, or failed, says nothing."""
        usage = request.usage
        if request.outcome == "failed" or not usage.num_output_tokens or not usage.busy_s:
            return
        wall_s = max(usage.finished_at - usage.started_at, usage.busy_s)
        # Where nobody saw the first token, all of the time counts as decoding: that makes tokens dearer, not cheaper.
        prefill_s = min(request.ttft_s or 0.0, wall_s)
        num_made = usage.num_output_tokens - usage.speculation.num_accepted_tokens
        steps = max(0.0, num_made / request.num_choices - (request.ttft_s is not None))
        self._forget()
        self.num_requests += 1
        self.usd += request.usd
        self.busy_s += usage.busy_s
        if request.ttft_s is not None:
            self.prefill_s += prefill_s
            self.prompt_tokens += usage.num_prompt_tokens - usage.num_cached_tokens
        if steps:
            self.decode_s += wall_s - prefill_s
            self.steps += steps

    def _forget(self) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * _KEPT)

    @property
    def is_known(self) -> bool:
        """Whether a request has ended that says something."""
        return self.num_requests > 0

    @property
    def usd_per_output_token(self) -> float:
        """0 where nothing is known. Where no request went on after its first token, that bounds a step."""
        if not self.busy_s:
            return 0.0
        step_s = self.decode_s / self.steps if self.steps else self.prefill_s / self.num_requests
        return step_s * self.usd / self.busy_s

    @property
    def usd_per_prompt_token(self) -> float:
        """No more than an output token's: a step computes many prompt tokens at once."""
        if not self.prompt_tokens:
            return self.usd_per_output_token
        return min(self.prefill_s / self.prompt_tokens * self.usd / self.busy_s, self.usd_per_output_token)

    def of(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """US dollars that a request costs at most, at this price; None where there is none yet."""
        if not self.is_known:
            return None
        return prompt_tokens * self.usd_per_prompt_token + output_tokens * self.usd_per_output_token
