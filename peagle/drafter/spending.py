"""Spending of a training, as records of the one ledger.

An attempt is a session in OUTPUT/ledger, from its start to its end, on all devices that it holds. It loads until the
first work; then all is work: states, steps, the estimate and saving the head. Work counts when it is kept: a shard with
its file, steps with their checkpoint. What a killed attempt did since then is lost, and the next attempt is another
session. A training has neither requests nor output tokens.

It knows no Ray. The answers to prompts are bulk runs, with ledgers of their own.
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
from peagle.economics.sessions import EngineFacts
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineSession, RequestUsage, UnitUsage
from peagle.errors import CapacityError, PriceError
from peagle.files import make_folder, writing
from peagle.hardware import Hardware

_BEAT_S = 5.0
_FULL = "free some space; the same command goes on from the last checkpoint"


class TrainingSpending:
    """The records of one attempt at a training.

    An attempt that ends well ends with what it kept last, one that fails with what it lost. Nothing is written before
    the first work: a refused training leaves nothing. Where the disk is full, each method raises CapacityError.

    Args:
        folder: of the ledger.
        now: Unix time.
    """

    def __init__(self, folder: Path, facts: EngineFacts, *, now: Callable[[], float] = time.time) -> None:
        self._folder, self._facts, self._now = folder, facts, now
        self._session_id = uuid.uuid4().hex
        self._began_at = self._seen_at = now()
        self._work_from: float | None = None
        self._kept_at = self._began_at
        self._num_kept = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._work_from is None:
            return
        with contextlib.suppress(CapacityError):  # its last heartbeat stands, and what ended it is said
            self._write(ended=True) if error is None else self._advance(ended=True)

    def start(self) -> None:
        """Loading is over; later calls change nothing."""
        if self._work_from is None:
            with writing(self._folder, hint=_FULL):
                make_folder(self._folder)
            self._work_from = self._kept_at = self._seen_at = max(self._now(), self._began_at)
            self._write()

    def beat(self) -> None:
        """Say now and then that the attempt is alive."""
        if self._now() - self._seen_at >= _BEAT_S:
            self._advance()

    def keep(self) -> None:
        """All work since the last time is safe from a kill."""
        self._advance()  # before the line that names it
        if self._seen_at > self._kept_at:
            with writing(self._folder, hint=_FULL):
                append_request(self._folder, self._kept_work())
            self._kept_at = self._seen_at

    def drop(self) -> None:
        """All work since the last time is lost."""
        self._advance()
        self._kept_at = self._seen_at

    def counting(self, extract: Callable[[Any, Callable[[int, int], None]], None]) -> Callable[..., None]:
        """The same extraction of states, each shard kept as it is done."""

        def counted(job: Any, progress: Callable[[int, int], None]) -> None:
            def stored(done: int, total: int) -> None:
                self.keep()
                progress(done, total)

            self.start()
            extract(job, stored)

        return counted

    def _kept_work(self) -> RequestUsage:
        self._num_kept += 1
        usage = UnitUsage.empty(
            self._session_id,
            started_at=self._kept_at,
            finished_at=self._seen_at,
            busy_s=self._seen_at - self._kept_at,
        )
        return self._facts.unbilled(f"{self._session_id}-{self._num_kept}", usage)

    def _advance(self, *, ended: bool = False) -> None:
        self._seen_at = max(self._now(), self._seen_at)  # a clock may be set back
        self._write(ended=ended)

    def _write(self, *, ended: bool = False) -> None:
        assert self._work_from is not None
        session = EngineSession(
            session_id=self._session_id,
            engine_index=0,
            hostname=socket.gethostname(),
            started_at=self._began_at,
            last_seen_at=self._seen_at,
            load_s=self._work_from - self._began_at,
            compile_s=0.0,
            busy_s=self._seen_at - self._work_from,
            idle_s=0.0,
            num_output_tokens=0,
            ended=ended,
            **asdict(self._facts),
        )
        with writing(self._folder, hint=_FULL):
            write_session(self._folder, session)


def training_spending(
    config: TrainConfig, hardware: Hardware, say: Callable[[str], None], *, on_gpu: bool, num_devices: int
) -> TrainingSpending:
    """The records of an attempt, not begun.

    Args:
        hardware: of a node that trains.
        on_gpu: its GPUs are paid for, else its vCPUs.
        num_devices: that the training holds.

    Raises:
        PriceError: a price was asked for and there is none. Where none was, the dollars are unknown.
    """
    device: Device = "accelerator" if on_gpu else "vcpu"
    price = _price(config, hardware, device, say)
    facts: dict[str, Any] = {"model": config.target, "drafter": None, "num_devices": num_devices, "device": device}
    folder, tags = (config.output / "ledger").resolve(), tags_to_text(config.tags)
    if price is None:
        return TrainingSpending(folder, EngineFacts(**facts, tags=tags))
    priced = EngineFacts.priced(price, **facts, tags=tags, num_speculative_tokens=None, baseline=None)
    return TrainingSpending(folder, priced)


def _price(config: TrainConfig, hardware: Hardware, device: Device, say: Callable[[str], None]) -> Price | None:
    try:
        price = resolve_price(config, hardware)
    except PriceError as error:
        if any(name in config.model_fields_set for name in PRICE_OPTIONS):
            raise
        say(f"the dollars of the training are unknown: {error.message}")
        return None
    if price.device != device:  # answers may have been priced on GPUs, and the training was sent to CPUs
        say(f"the dollars of the training are unknown: the price is per {price.device}, and it runs on a {device}")
        return None
    return price
