"""The account of one engine: how its time was spent, and a usage record per request."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from peagle.economics.ledger import append_beat, append_request, is_billed, requests_file, write_session
from peagle.economics.usage import EngineFacts, Outcome, RequestUsage, UnitUsage
from peagle.files import GroupSync, make_folder
from peagle.runs.meter import EngineMeter, new_session_id
from pipelines.cluster.metrics import UsageMetrics
from pipelines.online.serve.sequences import Sequences
from pipelines.online.wire import PEAGLE_KEY, AnswerTally, Context

_log = logging.getLogger("ray.serve")
_DISK_TIMEOUT_S = 5.0  # maximum wait for a record to reach the disk
# The first heartbeat of each minute stays in the ledger's history, since cost windows start on minutes (`cost.py`).
_HISTORY_INTERVAL_S = 60.0


class EngineAccount:
    """Accounts for an engine in the ledger, from the start of its process to its end. Creates the ledger's folder.

    Attributes:
        self_check: result of the engine's self-check as JSON; empty before it.
    """

    def __init__(
        self,
        folder: Path,
        engine: EngineFacts,
        *,
        heartbeat_s: float = 5.0,
        listener: UsageMetrics | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        make_folder(folder)
        self.session_id = new_session_id()
        self._disk_sync = GroupSync(requests_file(folder, self.session_id))
        self.engine_index = 0
        self.self_check = ""
        self.start_warnings: list[str] = []
        self._folder = folder
        self._engine = engine
        self._listener = listener
        self._monotonic = monotonic
        self._meter = EngineMeter(monotonic=monotonic)
        self._started_at = time.time()
        self._request_numbers = count()
        self._heartbeat_s = heartbeat_s
        self._next_history_at = 0.0
        self._ended = threading.Event()
        self.heartbeat()
        threading.Thread(target=self._heartbeat_until_end, daemon=True).start()

    def ready(self, compile_s: float = 0.0) -> None:
        """Mark the end of the engine's start, of which `compile_s` were spent on compiling."""
        self._meter.ready(compile_s)
        self.heartbeat()

    def begin(
        self, context: Context, *, choices_per_prompt: int | None = None, is_row: bool = False
    ) -> "RequestAccount":
        """Start accounting for a request that enters the engine.

        Args:
            context: `num_choices` is the number of slots that the request uses, which determines its share of the busy
                seconds. With `first_asked_at`, the request is only billed if no earlier engine has billed it.
            is_row: whether the request is a row of a batch; the run reports its rows to the listener itself.
        """
        number = next(self._request_numbers)
        self._meter.start(number, context.num_choices)
        return RequestAccount(self, number, context, AnswerTally(choices_per_prompt=choices_per_prompt), is_row=is_row)

    def end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.heartbeat()

    def heartbeat(self) -> None:
        session = self._meter.snapshot().to_session(
            self.session_id,
            self._engine,
            engine_index=self.engine_index,
            started_at=self._started_at,
            ended=self._ended.is_set(),
            self_check=self.self_check,
            start_warnings="\n".join(self.start_warnings),
        )
        write_session(self._folder, session)
        if session.last_seen_at >= self._next_history_at or session.ended:
            self._next_history_at = (session.last_seen_at // _HISTORY_INTERVAL_S + 1) * _HISTORY_INTERVAL_S
            append_beat(self._folder, session)
        if self._listener:
            self._listener.record_heartbeat(session)

    def _heartbeat_until_end(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            with contextlib.suppress(OSError):  # the next heartbeat includes these totals
                self.heartbeat()

    def _write(self, record: RequestUsage, *, first_asked_at: float | None, is_row: bool) -> bool:
        """Write a record unless another engine has billed the request. Returns whether it was written."""
        if first_asked_at is not None and is_billed(
            self._folder, record.request_id, since=first_asked_at, session_id=self.session_id
        ):
            return False
        append_request(self._folder, record)
        if self._listener and not is_row:
            self._listener.record_request(record)
        return True

    async def _wait_until_on_disk(self) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._disk_sync.sync()), _DISK_TIMEOUT_S)
        except OSError as error:  # includes timeouts
            reason = str(error) or f"the disk did not respond within {_DISK_TIMEOUT_S:g} s"
            _log.error("ledger %s: a power cut now would lose records of requests: %s", self._folder, reason)

    def _close_request(self, request: "RequestAccount", outcome: Outcome) -> RequestUsage:
        tally, engine, context = request.tally, self._engine, request.context
        if outcome != "ok" and not (tally.num_prompt_tokens or tally.num_output_tokens):
            # The answer ended before its usage was sent, so the engine's counters are used.
            tally.num_prompt_tokens = request.sequences.num_prompt_tokens
            tally.num_output_tokens = request.sequences.num_output_tokens
        self._meter.finish(request.number, tally.num_output_tokens, context.num_choices)
        busy_s = self._meter.pop_busy_s(request.number)
        ttft_s = request.ttft_s
        first_token_at = request.sequences.first_token_at
        if ttft_s is None and first_token_at is not None and outcome != "failed":
            ttft_s = max(0.0, first_token_at - request.started_at)
        return RequestUsage(
            request_id=context.request_id,
            key=context.key,
            account=context.account,
            tags=context.tags,
            model=engine.model,
            drafter=engine.drafter,
            outcome=outcome,
            ttft_s=ttft_s,
            usd=busy_s * engine.num_devices * engine.usd_per_device_s,
            num_choices=context.num_choices,
            usage=UnitUsage(
                session_id=self.session_id,
                num_rows=int(outcome != "failed"),
                num_failed_rows=int(outcome == "failed"),
                num_prompt_tokens=tally.num_prompt_tokens,
                num_cached_tokens=tally.num_cached_tokens,
                num_output_tokens=tally.num_output_tokens,
                busy_s=busy_s,
                speculation=request.sequences.speculation or tally.speculation,
                started_at=request.started_at,
                finished_at=max(time.time(), request.started_at),
            ),
        )


class RequestAccount:
    """Accounts for one request, by the usage in its answer (`tally`) and the engine's counters (`sequences`)."""

    def __init__(
        self, account: EngineAccount, number: int, context: Context, tally: AnswerTally, *, is_row: bool
    ) -> None:
        self.number = number
        self.context = context
        self.started_at = time.time()
        self.ttft_s: float | None = None
        self.tally = tally
        self.sequences = Sequences()
        self._account = account
        self._started_monotonic = account._monotonic()
        self._is_row = is_row
        self._record: RequestUsage | None = None
        self._is_written = False

    def record_first_token(self) -> None:
        """Record the time of the first token. Later calls have no effect."""
        if self.ttft_s is None:
            self.ttft_s = self._account._monotonic() - self._started_monotonic

    def finish(self, outcome: Outcome) -> RequestUsage:
        """Stop metering the request. Only the first outcome is kept."""
        if self._record is None:
            self._record = self._account._close_request(self, outcome)
        return self._record

    def write(self, outcome: Outcome) -> None:
        """Write the record. `outcome` is used if the request is unfinished, or was cut during delivery."""
        record = self.finish(outcome)
        if record.outcome == "ok" and outcome == "cut":
            record = replace(record, outcome=outcome)
        self._is_written = self._account._write(record, first_asked_at=self.context.first_asked_at, is_row=self._is_row)

    async def wait_until_on_disk(self) -> None:
        """Wait until the written record survives a power cut, with one `fdatasync` for requests that end together."""
        if self._is_written:
            await self._account._wait_until_on_disk()


def usage_of(record: RequestUsage) -> dict[str, Any]:
    tokens = {"prompt_tokens": record.usage.num_prompt_tokens, "completion_tokens": record.usage.num_output_tokens}
    return {"usage": tokens, PEAGLE_KEY: summary(record)}


def summary(record: RequestUsage) -> dict[str, Any]:
    """Return the fields that a response has in addition to OpenAI's usage."""
    speculation = record.usage.speculation
    return {
        "request_id": record.request_id,
        "usd": round(record.usd, 10),
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
        "engine_s": round(record.usage.busy_s, 4),
        "num_drafts": speculation.num_drafts,
        "num_draft_tokens": speculation.num_draft_tokens,
        "num_accepted_tokens": speculation.num_accepted_tokens,
        "num_lookup_tokens": speculation.num_lookup_tokens,
        "num_dropped_tokens": speculation.num_dropped_tokens,
        "acceptance_length": speculation.acceptance_length,
    }
