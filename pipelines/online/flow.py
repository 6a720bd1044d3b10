"""Back-pressure for downloads: the ingress learns how much of an answer its client has taken.

Ray Serve 2.60 pulls an answer out of the ingress as fast as it is made, and keeps in its proxy what the client has not
taken: only `send` in the proxy waits for the client. The messages of `receive` go the other way, from the proxy to the
ingress, as they are. So the proxy's end puts notes of what was taken among them, and the ingress waits for these.

    client <- server <- Notes (in the proxy, see `front.py`) <- Serve <- Window (in the ingress)

A client cannot write a note: a server knows no message with such a key. It knows ASGI, no Ray.
"""

import asyncio
import contextlib

from starlette.types import Message, Receive, Send

_TAKEN = "peagle.taken"  # of a message's keys: bytes of the answer that the client has taken until now


class Notes:
    """The proxy's end: `receive` and `send` for a request whose body does not matter.

    The first message says that there are notes; each later one what was taken, or that the client has left.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._num_taken = 0
        self._news = asyncio.Event()
        self._news.set()
        self._leaving: asyncio.Task[None] | None = None
        self._disconnect: Message | None = None

    async def send(self, message: Message) -> None:
        """Send a message, which waits for the client."""
        await self._send(message)
        self._num_taken += len(message.get("body", b""))
        self._news.set()

    async def receive(self) -> Message:
        """The next note, or the end of the client."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._wait_until_it_leaves())
        await self._news.wait()
        self._news.clear()
        if self._disconnect is not None:
            self._news.set()  # it is said as often as it is asked for
            return self._disconnect
        return {"type": "http.request", "body": b"", "more_body": False, _TAKEN: self._num_taken}

    def close(self) -> None:
        """Listen to the client no longer."""
        if self._leaving is not None:
            self._leaving.cancel()

    async def _wait_until_it_leaves(self) -> None:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass  # a body: nobody reads it, so it must not pile up
        self._disconnect = message
        self._news.set()


class Window:
    """The ingress's end: how much of an answer is under way.

    Attributes:
        has_notes: whether the proxy's end is there; else nothing is known until the client has all of it, or has left.
        has_left: the client has all of the answer, or does not want it any more.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_taken = 0
        self.has_notes = self.has_left = False

    async def open(self, timeout_s: float) -> None:
        """Find out whether there are notes: the first message says it."""
        with contextlib.suppress(TimeoutError):  # a body that does not come; nobody needs it
            async with asyncio.timeout(timeout_s):
                await self._read()

    async def wait(self, num_sent: int, most: int) -> None:
        """Wait until no more than `most` of the bytes that were sent are under way, or the client has left."""
        while not self.has_left and num_sent - self._num_taken > most:
            await self._read()

    async def wait_for_end(self) -> None:
        """Wait until the client has all of the answer, or has left: the server says the one as the other."""
        while not self.has_left:
            await self._read()

    async def _read(self) -> None:
        message = await self._receive()
        self.has_left = message["type"] == "http.disconnect"
        if _TAKEN in message:
            self.has_notes = True
            self._num_taken = message[_TAKEN]
