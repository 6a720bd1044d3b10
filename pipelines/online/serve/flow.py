"""Back-pressure between client and ingress for files. Ray Serve 2.60 itself would buffer whole files.

Serve also forwards messages that go against the direction of the data, unchanged. So receivers acknowledge what they
have received, and senders wait for that. Clients cannot forge acknowledgements, since HTTP servers never produce such
keys and types.

    client <- server <- DownloadAckSender <- Serve <- DownloadWindow     (`batches/downloads.py`)
    client -> server -> UploadThrottle    -> Serve -> UploadAckReceiver  (`gateway/bodies.py`)

A proxy that Ray started without `deploy/ray.env` lacks this middleware, which the ingress notices at the first message.
"""

import asyncio
import contextlib

from starlette.types import Message, Receive, Send

_ACK = "peagle.ack"  # message key: bytes of the answer that the client has received
_EXPECTS_ACKS = "peagle.expects_acks"  # message key: the sender waits for acknowledgements
_READ = "peagle.read"  # message type: bytes of the body that were read
UPLOAD_WINDOW_BYTES = 1 << 21  # 2 MiB
_PATIENCE_S = 1.0  # wait for an acknowledgement from an application that never sent one


class DownloadAckSender:
    """The proxy's end of a download: acknowledges what the client has received.

    Its first message announces acknowledgements. Each later one says how much was received, or that the client has
    disconnected. The request's body is ignored.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._num_acked = 0
        self._has_changed = asyncio.Event()
        self._has_changed.set()
        self._disconnect_watcher: asyncio.Task[None] | None = None
        self._disconnect: Message | None = None

    async def send(self, message: Message) -> None:
        await self._send(message)
        self._num_acked += len(message.get("body", b""))
        self._has_changed.set()

    async def receive(self) -> Message:
        if self._disconnect_watcher is None:
            self._disconnect_watcher = asyncio.create_task(self._wait_for_disconnect())
        await self._has_changed.wait()
        self._has_changed.clear()
        if self._disconnect is not None:
            self._has_changed.set()  # every later call returns the disconnect, too
            return self._disconnect
        return {"type": "http.request", "body": b"", "more_body": False, _ACK: self._num_acked}

    def close(self) -> None:
        if self._disconnect_watcher is not None:
            self._disconnect_watcher.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass  # drop the body
        self._disconnect = message
        self._has_changed.set()


class UploadThrottle:
    """The proxy's end of an upload: forwards at most one window (2 MiB) more than was acknowledged.

    The client keeps the rest, since the server stops reading when the application does. Applications other than the
    ingress send no acknowledgements, so they get one window per second.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._num_passed = self._num_read = 0
        self._is_answered = self._has_acks = False
        self._has_changed = asyncio.Event()

    async def send(self, message: Message) -> None:
        """Send a message to the client, or handle an acknowledgement."""
        if message["type"] == _READ:
            self._has_acks = True
            self._num_read = message["num_bytes"]
        else:
            self._is_answered = True  # nothing waits for the rest of the body
            await self._send(message)
        self._has_changed.set()

    async def receive(self) -> Message:
        """Return the next piece of the body when there is room for it."""
        while self._num_passed - self._num_read >= UPLOAD_WINDOW_BYTES and not self._is_answered:
            self._has_changed.clear()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._has_changed.wait()
            except TimeoutError:
                if not self._has_acks:
                    self._num_read = self._num_passed
        message = await self._receive()
        self._num_passed += len(message.get("body", b""))
        return {**message, _EXPECTS_ACKS: True}


class UploadAckReceiver:
    """The ingress's end of an upload: a `receive` that acknowledges what was read, if the proxy waits for it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._num_read = self._num_acked = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._num_read += len(message.get("body", b""))
        if _EXPECTS_ACKS in message and self._num_read - self._num_acked >= UPLOAD_WINDOW_BYTES // 4:
            self._num_acked = self._num_read
            await self._send({"type": _READ, "num_bytes": self._num_read})
        return message


class DownloadWindow:
    """The ingress's end of a download: tracks how much the client has not received yet.

    Attributes:
        has_acks: whether the proxy sends acknowledgements. Without them, the ingress only learns when the client has
            received everything or disconnected.
        has_left: whether the client has received everything or disconnected.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_acked = 0
        self.has_acks = self.has_left = False

    async def open(self, timeout_s: float) -> None:
        """Read the first message, which announces whether there will be acknowledgements."""
        # Without acknowledgements, the first message is the request's body, which may never come and is not needed.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._read()

    async def wait(self, num_sent: int, max_bytes: int) -> None:
        """Wait until at most `max_bytes` of the sent bytes are unacknowledged, or the client disconnected."""
        while not self.has_left and num_sent - self._num_acked > max_bytes:
            await self._read()

    async def wait_for_end(self) -> None:
        """Wait until the client has received everything or disconnected; servers report both in the same way."""
        while not self.has_left:
            await self._read()

    async def _read(self) -> None:
        message = await self._receive()
        self.has_left = message["type"] == "http.disconnect"
        if _ACK in message:
            self.has_acks = True
            self._num_acked = message[_ACK]
