"""Metrics of a request's sequences that vLLM's API does not report.

vLLM 0.29 reports drafts only for answers with one sequence, loses them if a stream's end arrives together with earlier
output, and reports no time to first token for non-streaming answers. So drafts and times are read from the
`RequestState`s of its front end.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from peagle.engine.vllm_internals import drafts_of
from peagle.speculation import SpeculationStats


@dataclass(slots=True)
class Sequences:
    """The sequences of one request. Empty if the engine is not vLLM."""

    _states: list[Any] = field(default_factory=list)
    # Totals of sequences that ended and were dropped.
    _drafts: SpeculationStats | None = None
    _first_token_at: float | None = None
    _prompt_tokens: int = 0
    _output_tokens: int = 0

    def listen(self) -> None:
        """Collect the sequences that this task and its child tasks add to the engine from now on."""
        _LISTENER.set(self)

    def add(self, state: Any, live: Mapping[str, Any]) -> None:
        """Add a sequence (vLLM's `RequestState`), and replace ended ones by totals, since a state keeps all its tokens.

        `live` has vLLM's running states by request id.
        """
        self._drafts = self.speculation  # only ended sequences report drafts, so nothing is counted twice
        self._first_token_at = self.first_token_at
        ended = [other for other in self._states if live.get(other.request_id) is not other]
        self._prompt_tokens += _prompt_tokens(ended)
        self._output_tokens += _output_tokens(ended)
        self._states = [*(other for other in self._states if other not in ended), state]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all prompts, even of failed ones."""
        return self._prompt_tokens + _prompt_tokens(self._states)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, for all choices."""
        return self._output_tokens + _output_tokens(self._states)

    @property
    def speculation(self) -> SpeculationStats | None:
        """Drafts of the ended sequences. None if vLLM has none: after a `stop` string or a cancellation."""
        drafts = [stats for state in self._states if (stats := drafts_of(state)) is not None]
        drafts += [self._drafts] if self._drafts is not None else []
        return sum(drafts, start=SpeculationStats.empty()) if drafts else None

    @property
    def first_token_at(self) -> float | None:
        """Unix time of the first token of any sequence, or None."""
        stats = [state.stats for state in self._states if state.stats is not None and state.stats.first_token_ts]
        times = [stat.arrival_time + stat.first_token_latency for stat in stats]
        return min(times if self._first_token_at is None else [*times, self._first_token_at], default=None)


def _prompt_tokens(states: Iterable[Any]) -> int:
    return sum(state.prompt_len for state in states if not state.request_index)  # choices share their prompt


def _output_tokens(states: Iterable[Any]) -> int:
    return sum(state.stats.num_generation_tokens for state in states if state.stats is not None)


_LISTENER: ContextVar[Sequences | None] = ContextVar("listener", default=None)


def report_sequences(client: Any) -> None:
    """Make an `AsyncLLM` report each sequence that it starts."""
    processor = client.output_processor
    add_request = processor.add_request

    def add_and_notify(request: Any, *arguments: Any, **options: Any) -> None:
        add_request(request, *arguments, **options)
        if (listener := _LISTENER.get()) is not None:
            states = processor.request_states
            listener.add(states[request.request_id], states)

    processor.add_request = add_and_notify
