"""Two processes prove to each other that both know the mesh token, without sending it.

Leader → host: magic, 32 random bytes. Host → leader: magic, 32 random bytes, proof over both. Leader → host: its proof
over both. Everything has one size, so nothing is read or allocated by what a stranger says; each proof names who
gives it, so none can be sent back as an answer. Whoever can change packets on the way can still take the connection
over afterwards, as he can with the collectives: they are for a network that is the engine's own.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from typing import Protocol

from kvmesh.errors import DataLoss, DeadlineExceeded, Unauthenticated, Unavailable

MAGIC = b"KVTPHOST"
NONCE_BYTES = 32
# In hex.
PROOF_BYTES = 64
HANDSHAKE_S = 10.0
_HOST, _LEADER = b"tp-host\0", b"tp-leader\0"


class Prover(Protocol):
    """See `kvmesh.rpc.auth.MeshToken`."""

    def sign(self, data: bytes) -> str:
        """Proof, in hex, that a member of the mesh wrote `data`."""

    def signed(self, data: bytes, proof: str) -> bool:
        """True for such a proof."""


def admit(sock: socket.socket, prover: Prover, timeout_s: float = HANDSHAKE_S) -> None:
    """The leader's side. Raises Unauthenticated, DataLoss, DeadlineExceeded, Unavailable, OSError."""
    deadline = time.monotonic() + timeout_s
    ours = secrets.token_bytes(NONCE_BYTES)
    _send(sock, MAGIC + ours, deadline)
    theirs, proof = _split(_exactly(sock, len(MAGIC) + NONCE_BYTES + PROOF_BYTES, deadline, "what came"))
    if not prover.signed(_HOST + ours + theirs, proof):
        raise Unauthenticated("it does not know the mesh token")
    _send(sock, prover.sign(_LEADER + ours + theirs).encode(), deadline)


def enter(sock: socket.socket, prover: Prover, timeout_s: float = HANDSHAKE_S) -> None:
    """The host's side. Raises Unauthenticated and DataLoss, which last; DeadlineExceeded, Unavailable, OSError."""
    deadline = time.monotonic() + timeout_s
    theirs, _ = _split(_exactly(sock, len(MAGIC) + NONCE_BYTES, deadline, "what answers there"))
    ours = secrets.token_bytes(NONCE_BYTES)
    _send(sock, MAGIC + ours + prover.sign(_HOST + theirs + ours).encode(), deadline)
    try:
        proof = _exactly(sock, PROOF_BYTES, deadline, "what answers there")
    except (Unavailable, ConnectionError):
        raise Unauthenticated("the leader refused this host's proof: is its mesh token another one?") from None
    if not prover.signed(_LEADER + theirs + ours, proof.decode("ascii", "replace")):
        raise Unauthenticated("what answers there does not know the mesh token")


def _split(data: bytes) -> tuple[bytes, str]:
    """(random bytes, proof)."""
    rest = data[len(MAGIC) :]
    return rest[:NONCE_BYTES], rest[NONCE_BYTES:].decode("ascii", "replace")


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        sock.sendall(data)
    except TimeoutError:
        raise DeadlineExceeded("it takes nothing") from None


def _exactly(sock: socket.socket, count: int, deadline: float, who: str) -> bytes:
    """Whatever does not begin with the magic word is refused as soon as that is seen (but a proof, which has none)."""
    data = bytearray()
    while len(data) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(InterruptedError):
            try:
                part = sock.recv(count - len(data))
            except TimeoutError:
                raise DeadlineExceeded("it says too little in time") from None
            if not part:
                raise Unavailable("it closed the connection")
            data += part
            if count != PROOF_BYTES and data[: len(MAGIC)] != MAGIC[: len(data)]:
                raise DataLoss(f"{who} is no part of a kvmesh engine")
    return bytes(data)
