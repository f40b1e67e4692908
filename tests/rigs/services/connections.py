"""A way to the broker that counts who takes it: every Kafka client connects once to its bootstrap address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Way:
    """A TCP address that leads to another one."""

    def __init__(self) -> None:
        self.num_clients = 0
        self.address = ""
        self._open: set[asyncio.Task[None]] = set()

    async def pass_on(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_clients += 1
        there, back = await asyncio.open_connection(host, port)
        for one, other in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._copy(one, other))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


@asynccontextmanager
async def counted(bootstrap_servers: str) -> AsyncIterator[Way]:
    """A way to a broker's address."""
    host, _, port = bootstrap_servers.partition(":")
    way = Way()
    server = await asyncio.start_server(lambda r, w: way.pass_on(host, int(port), r, w), "127.0.0.1", 0)
    way.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        server.close()
        await way.close()
