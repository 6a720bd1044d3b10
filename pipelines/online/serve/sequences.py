"""The sequences of a request, which vLLM's API tells of some requests only.

vLLM 0.29 states drafts in an answer of one sequence only, and loses them where the end of a stream is told together
with what came before it; of an answer that is not streamed it states no time to the first token. Both are in the states
that its front end keeps, one for each choice of each prompt. Whoever is about to have a request answered listens, and
the states of the sequences that this starts are theirs. It knows vLLM's `OutputProcessor`; it imports nothing of it.
"""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from peagle.engine.vllm_internals import drafts_of
from peagle.speculation import SpeculationStats


@dataclass(slots=True)
class Sequences:
    """The sequences of one request; none where the engine is not vLLM."""

    _states: list[Any] = field(default_factory=list)
    _drafts: SpeculationStats | None = None  # of those that were let go
    _began_at: float | None = None  # likewise

    def listen(self) -> None:
        """Take those that are started from here on, by this task or what it starts."""
        _LISTENER.set(self)

    def add(self, state: Any, live: Mapping[str, Any]) -> None:
        """One more: vLLM's `RequestState`.

        Of those that are no longer among the live ones only the figures are kept: each holds all of its tokens.
        """
        self._drafts, self._began_at = self.speculation, self.first_token_at  # of live ones vLLM tells no drafts
        self._states = [*(one for one in self._states if live.get(one.request_id) is one), state]

    @property
    def speculation(self) -> SpeculationStats | None:
        """Drafts of the ended sequences; None where there are none.

        Without those that a string of the request's `stop` ended: of these, as of one that is cut, vLLM tells none.
        """
        told = [found for state in self._states if (found := drafts_of(state)) is not None]
        told += [self._drafts] if self._drafts is not None else []
        return sum(told, start=SpeculationStats.empty()) if told else None

    @property
    def first_token_at(self) -> float | None:
        """Unix time of the first token of any of them; None before."""
        return min(self._first_tokens_at(), default=None)

    def _first_tokens_at(self) -> Iterator[float]:
        if self._began_at is not None:
            yield self._began_at
        for state in self._states:
            if state.stats is not None and state.stats.first_token_ts:
                yield state.stats.arrival_time + state.stats.first_token_latency


_LISTENER: ContextVar[Sequences | None] = ContextVar("listener", default=None)


def tell_sequences(client: Any) -> None:
    """Have an `AsyncLLM` report each sequence that it starts."""
    processor = client.output_processor
    add_request = processor.add_request

    def add_and_tell(request: Any, *arguments: Any, **options: Any) -> None:
        add_request(request, *arguments, **options)
        if (listener := _LISTENER.get()) is not None:
            states = processor.request_states
            listener.add(states[request.request_id], states)

    processor.add_request = add_and_tell
