"""Back-pressure between a client and the ingress, which Serve lacks.

Files would pile up in between.

Ray Serve 2.60 pulls an answer out of the ingress as fast as it is made, and a body out of the client as fast as it
comes; only the server in the proxy knows to wait. The messages of the other direction go through Serve as they are. So
each end that takes says among these how much it has taken, and the other waits for that.

    client <- server <- Notes   <- Serve <- Window (`batches/downloads.py`)
    client -> server -> Reading -> Serve -> Told   (`gateway/bodies.py`)

A client can say nothing of the kind: a server makes no message with such a key or of such a type. The middle ones are
in the proxy (`proxy.py`). Where they are not, as on nodes that somebody started in another environment, the ingress
sees that in the first message. It knows ASGI, no Ray.
"""

import asyncio
import contextlib

from starlette.types import Message, Receive, Send

_TAKEN = "peagle.taken"  # a key of a message: bytes of the answer that the client has taken until now
_IS_TOLD = "peagle.is_told"  # a key of a message: that its sender waits to be told what was read
_READ = "peagle.read"  # a type of messages: bytes of the body that were read until now
UPLOAD_WINDOW_BYTES = 1 << 21
_PATIENCE_S = 1.0


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


class Reading:
    """The proxy's end of a body: a `receive` and `send` that hand on no more.

    The ingress is not to have more at once.

    What is more stays with the client: a server stops reading where nobody asks for more. Another application than the
    ingress tells nothing, and gets a window each second.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._num_passed = self._num_read = 0
        self._is_answered = self._is_told = False
        self._news = asyncio.Event()

    async def send(self, message: Message) -> None:
        """Send a message to the client, or hear what the ingress has read."""
        if message["type"] == _READ:
            self._is_told = True
            self._num_read = message["num_bytes"]
        else:
            self._is_answered = True  # the rest of the body is nobody's any more
            await self._send(message)
        self._news.set()

    async def receive(self) -> Message:
        """The next piece of the body, when there is room for it."""
        while self._num_passed - self._num_read >= UPLOAD_WINDOW_BYTES and not self._is_answered:
            self._news.clear()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._news.wait()
            except TimeoutError:
                if not self._is_told:
                    self._num_read = self._num_passed
        message = await self._receive()
        self._num_passed += len(message.get("body", b""))
        return {**message, _IS_TOLD: True}


class Told:
    """The ingress's end of a body: a `receive` that reports reading.

    To whoever waits for that.

    Args:
        send: as the answer's messages are sent.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._num_read = self._num_told = 0

    async def __call__(self) -> Message:
        """The next message."""
        message = await self._receive()
        self._num_read += len(message.get("body", b""))
        if _IS_TOLD in message and self._num_read - self._num_told >= UPLOAD_WINDOW_BYTES // 4:
            self._num_told = self._num_read
            await self._send({"type": _READ, "num_bytes": self._num_read})
        return message


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
        """Wait until at most `most` sent bytes are under way, or the client left."""
        while not self.has_left and num_sent - self._num_taken > most:
            await self._read()

    async def wait_for_end(self) -> None:
        """Wait until the client has all of the answer, or has left.

        The server says the one as the other.
        """
        while not self.has_left:
            await self._read()

    async def _read(self) -> None:
        message = await self._receive()
        self.has_left = message["type"] == "http.disconnect"
        if _TAKEN in message:
            self.has_notes = True
            self._num_taken = message[_TAKEN]
