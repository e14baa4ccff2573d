"""A link of so many bytes a second and such a delay, each way, between islands and a hub."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress

PIECE = 16 << 10
BUFFERED = 16
"""Pieces that may be on their way."""

UP, DOWN = "up", "down"


class SlowLink:
    """Listens at ``port`` for connections to a port of this machine, which share the link.
    ``bytes`` has what went each way. A new connection takes as long as there and back."""

    def __init__(self, to: int, rate: float, delay: float) -> None:
        self.bytes: Counter[str] = Counter()
        self._to, self._rate, self._delay = to, rate, delay
        self._free = {UP: 0.0, DOWN: 0.0}
        self._loop = asyncio.new_event_loop()
        listening = asyncio.start_server(self._relay, "127.0.0.1", 0)
        server = self._loop.run_until_complete(listening)
        self.port: int = server.sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _relay(self, near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self._delay)
        far, forward = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._pump(UP, near, forward), self._pump(DOWN, far, answer))

    async def _pump(self, way: str, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        """Send what comes as fast as the link has room, and let it arrive late."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BUFFERED)
        arriving = asyncio.create_task(self._arrive(late, to))
        data = b"\0"
        while data:
            try:
                data = await source.read(PIECE)
            except ConnectionError:
                data = b""
            self.bytes[way] += len(data)
            now = self._loop.time()
            self._free[way] = sent = max(now, self._free[way]) + len(data) / self._rate
            await asyncio.sleep(sent - now)
            await late.put((sent + self._delay, data))
        await arriving

    async def _arrive(
        self, late: asyncio.Queue[tuple[float, bytes]], to: asyncio.StreamWriter
    ) -> None:
        data = b"\0"
        while data:
            at, data = await late.get()
            await asyncio.sleep(at - self._loop.time())
            with suppress(ConnectionError):
                to.write(data)
                await to.drain()
        to.close()
