"""Client of a kvmesh gateway.

    async with Client("127.0.0.1:8080") as client:
        stream = client.chat([{"role": "user", "content": "Hello"}], max_tokens=64)
        async for event in stream:
            print(event.delta.text, end="")
        print(stream.finished.usage)

`SyncClient` is the same for programs without an event loop. Failures raise the classes of `kvmesh.errors`.
docs/client.md tells the rest.
"""

from kvmesh.client.answer import Answer
from kvmesh.client.client import DEFAULT_MODEL, Client
from kvmesh.client.retry import NO_RETRY, Retry
from kvmesh.client.stream import Stream
from kvmesh.client.sync import SyncClient, SyncStream

__all__ = ["DEFAULT_MODEL", "NO_RETRY", "Answer", "Client", "Retry", "Stream", "SyncClient", "SyncStream"]
