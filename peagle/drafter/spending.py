"""The cost of a training run in the ledger OUTPUT/ledger: one session per attempt, for all devices that it uses.

The time until the first work counts as loading. Work is computing hidden states, training steps, estimating the
acceptance, and saving the head. Work is recorded when its result is saved; unsaved work of a killed attempt is lost.
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peagle.drafter.config import TrainConfig
from peagle.economics.ledger import append_request, write_session
from peagle.economics.price_options import PRICE_OPTIONS, resolve_price
from peagle.economics.prices import Device, Price
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineFacts, EngineSession, UnitUsage
from peagle.errors import CapacityError, PriceError
from peagle.files import converted_write_errors, make_folder
from peagle.hardware import Hardware

_HEARTBEAT_S = 5.0
_DISK_FULL_HINT = "free some space, then repeat the command to resume from the last checkpoint"


class TrainingSpending:
    """Records the cost of one attempt of a training run.

    The session of a successful attempt ends with its last saved work; that of a failed attempt includes the lost work.
    Nothing is written before the first work, so that a rejected training run leaves no files.
    """

    def __init__(self, folder: Path, facts: EngineFacts, *, now: Callable[[], float] = time.time) -> None:
        self._folder, self._facts, self._now = folder, facts, now
        self._session_id = uuid.uuid4().hex
        self._started_at = self._seen_at = now()
        self._first_work_at: float | None = None
        self._recorded_until = self._started_at
        self._num_recorded = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first_work_at is None:
            return
        with contextlib.suppress(CapacityError):  # the last heartbeat remains; report the original error
            self._write(ended=True) if error is None else self._advance(ended=True)

    def start(self) -> None:
        """Record that work begins. Only the first call has an effect."""
        if self._first_work_at is None:
            with converted_write_errors(self._folder, hint=_DISK_FULL_HINT):
                make_folder(self._folder)
            self._first_work_at = self._recorded_until = self._seen_at = max(self._now(), self._started_at)
            self._write()

    def beat(self) -> None:
        if self._now() - self._seen_at >= _HEARTBEAT_S:
            self._advance()

    def record_saved(self) -> None:
        """Record that all work since the last `record_saved` or `record_lost` has been saved."""
        self._advance()  # write the session before a record that refers to it
        if self._seen_at > self._recorded_until:
            self._num_recorded += 1
            usage = UnitUsage.empty(
                self._session_id,
                started_at=self._recorded_until,
                finished_at=self._seen_at,
                busy_s=self._seen_at - self._recorded_until,
            )
            with converted_write_errors(self._folder, hint=_DISK_FULL_HINT):
                append_request(
                    self._folder, self._facts.unbilled_request(f"{self._session_id}-{self._num_recorded}", usage)
                )
            self._recorded_until = self._seen_at

    def record_lost(self) -> None:
        """Record that all work since the last `record_saved` or `record_lost` is lost."""
        self._advance()
        self._recorded_until = self._seen_at

    def recording(self, extract: Callable[[Any, Callable[[int, int], None]], None]) -> Callable[..., None]:
        """Wrap a function that computes hidden states, so that each finished shard is recorded."""

        def recorded(job: Any, progress: Callable[[int, int], None]) -> None:
            def on_shard(done: int, total: int) -> None:
                self.record_saved()
                progress(done, total)

            self.start()
            extract(job, on_shard)

        return recorded

    def _advance(self, *, ended: bool = False) -> None:
        self._seen_at = max(self._now(), self._seen_at)  # the clock may be set back
        self._write(ended=ended)

    def _write(self, *, ended: bool = False) -> None:
        assert self._first_work_at is not None
        session = EngineSession(
            session_id=self._session_id,
            engine_index=0,
            hostname=socket.gethostname(),
            started_at=self._started_at,
            last_seen_at=self._seen_at,
            load_s=self._first_work_at - self._started_at,
            compile_s=0.0,
            busy_s=self._seen_at - self._first_work_at,
            idle_s=0.0,
            num_output_tokens=0,
            ended=ended,
            **asdict(self._facts),
        )
        with converted_write_errors(self._folder, hint=_DISK_FULL_HINT):
            write_session(self._folder, session)


def training_spending(
    config: TrainConfig, hardware: Hardware, say: Callable[[str], None], *, on_gpu: bool, num_devices: int
) -> TrainingSpending:
    """Return the recorder of an attempt that has not started."""
    device: Device = "accelerator" if on_gpu else "vcpu"
    price = _training_price(config, hardware, device, say)
    facts = EngineFacts.priced(
        price, model=config.model, num_devices=num_devices, device=device, tags=tags_to_text(config.tags)
    )
    return TrainingSpending((config.output / "ledger").resolve(), facts)


def _training_price(
    config: TrainConfig, hardware: Hardware, device: Device, say: Callable[[str], None]
) -> Price | None:
    try:
        price = resolve_price(config, hardware)
    except PriceError as error:
        if any(name in config.model_fields_set for name in PRICE_OPTIONS):
            raise
        say(f"the cost of this training run is unknown: {error.message}")
        return None
    if price.device != device:  # for example, responses were generated on GPUs and the training runs on CPUs
        say(f"the cost of this training run is unknown: the price is per {price.device}, not per {device}")
        return None
    return price
