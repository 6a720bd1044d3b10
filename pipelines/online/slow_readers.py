"""A connection whose client does not take its answer is closed: uvicorn itself waits for ever.

What a client has not taken waits in the server, and behind it, in Ray's proxy and its shared memory, all that has been
made of the answer. So a client that takes less than `LEAST_BYTES` within `READER_LIMIT_S` while more is there for it
loses the connection. It knows asyncio's transports, and is put before uvicorn's protocols by `slow_headers.py`; no Ray.
"""

import asyncio
import socket
import struct

READER_LIMIT_S = 60.0
LEAST_BYTES = 64 * 1024


class SlowReaders(asyncio.Protocol):
    """What stands before a protocol of uvicorn: a timer that runs while its buffer is full."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _reading: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The buffer is full: the client should take some."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        """It has."""
        self._stop_looking()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody to wait for."""
        self._stop_looking()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._stop_looking()
        self._reading = self.loop.call_later(READER_LIMIT_S, self._look, self.transport.get_write_buffer_size())

    def _look(self, before: int) -> None:
        """Whether enough was taken. Nothing was added meanwhile: uvicorn waits while the buffer is full."""
        if before - self.transport.get_write_buffer_size() < LEAST_BYTES:
            # Else the kernel would go on with what it has of the answer.
            socket_ = self.transport.get_extra_info("socket")
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._look_again()

    def _stop_looking(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
