"""A port that processes share is held by their parent: taken for others, free for its own."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from kvmesh.config import GatewaySettings
from kvmesh.errors import FailedPrecondition
from services.gateway.processes.child import Child
from services.gateway.processes.parent import child_settings
from services.gateway.processes.ports import HeldPort


def listen(address: str, *, share: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    made = socket.socket()
    if share:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind((host, int(port)))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def test_a_held_port_is_taken_for_others_and_free_for_our_own() -> None:
    with contextlib.closing(HeldPort("127.0.0.1:0")) as held:
        assert not held.address.endswith(":0")
        with pytest.raises(FailedPrecondition, match="cannot listen on"):
            HeldPort(held.address)
        with pytest.raises(OSError, match="in use"):
            listen(held.address, share=False)
        with listen(held.address, share=True), listen(held.address, share=True) as second:
            # Who holds it gets no connections.
            first = socket.create_connection(second.getsockname(), 60)
            first.close()
            with pytest.raises(FailedPrecondition):
                HeldPort(held.address)
    with contextlib.closing(HeldPort(held.address)):
        pass


@pytest.mark.parametrize("share", [False, True])
def test_a_port_on_which_somebody_listens_is_refused(share: bool) -> None:
    with socket.socket() as other:
        if share:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(FailedPrecondition, match="in use"):
            HeldPort(f"127.0.0.1:{other.getsockname()[1]}")


@pytest.mark.parametrize("address", ["unix:/tmp/x.sock", "192.0.2.1:0", "no-such-host.invalid:1"])
def test_addresses_that_cannot_be_shared(address: str) -> None:
    with pytest.raises(FailedPrecondition):
        HeldPort(address)


def test_settings_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child.from_environment()
    assert child is None
    made = Child(1, Path("/run/x"), 7, "127.0.0.1:5", "127.0.0.1:6")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    assert Child.from_environment() == made
    given = GatewaySettings(
        instance="gw", processes=2, metrics_listen="127.0.0.1:9", peer_listen="127.0.0.1:70", listen="127.0.0.1:0"
    )
    own = child_settings(given, made)
    assert (own.listen, own.http_listen, own.metrics_listen) == ("127.0.0.1:5", "127.0.0.1:6", "")
    assert (own.instance, own.peer_listen, str(own.ready_file)) == ("gw-1", "127.0.0.1:71", "/run/x/1.ready")
