"""The mesh of docker-compose.yml on the real model: asked, killed part by part, scaled, and gone without a trace.

The tests share one mesh and run in their order. Each leaves every service healthy.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable

import pytest
from compose_mesh import SERVICES, WAIT_S, Answer, Container, Mesh, ask, long_question, until

from kvmesh.client import SyncClient
from kvmesh.errors import KvmeshError

SOAK = bool(os.environ.get("KVMESH_SOAK"))
KILLS = 6 if SOAK else 1
# Tokens of a stream that is long enough to be killed in its middle.
LONG = 160
Tell = Callable[[str, object], None]


@pytest.fixture(scope="module")
def told(client: SyncClient) -> Answer:
    """A long greedy answer, nobody harmed: what a healed stream must say word for word."""
    return ask(client, long_question("Norway"), max_tokens=LONG)


def attached(mesh: Mesh, role: str) -> int:
    return int(mesh.metric("router", "kvmesh:router_workers", role=role))


def wait_attached(mesh: Mesh, **roles: int) -> None:
    """The router knows as many workers; a dead one is forgotten."""
    until(lambda: all(attached(mesh, role) == count for role, count in roles.items()), f"workers {roles} at the router")


def paired(mesh: Mesh) -> None:
    """Every engine and every sidecar has a partner: decode is ready without, so this is asked of the sidecars."""
    for service, engine in (("kvtransfer-decode", "decode"), ("kvtransfer-prefill", "prefill")):
        for container in mesh.wait_healthy(service, engine):
            if container.service == service:
                probe = ("exec", container.id, "kvmesh-probe", "127.0.0.1:50055", "kvmesh.v1.KvTransfer")
                until(lambda probe=probe: mesh.succeeds(*probe), f"{container.service} {container.short} has an engine")


def moves(mesh: Mesh, client: SyncClient, subject: str) -> Answer:
    """A question whose KV goes from prefill to decode, sooner or later: both ends of a link find each other again."""
    number = 0

    def answered() -> Answer | None:
        nonlocal number
        number += 1
        answer = ask(client, long_question(f"{subject} {number}"), max_tokens=4)
        return answer if answer.served.transfer_bytes else None

    found: Answer = until(answered, f"KV moves again ({subject})", every_s=0.5)
    return found


def test_a_question_is_answered_with_kv_moved_between_containers(
    mesh: Mesh, client: SyncClient, record_property: Tell
) -> None:
    before = {
        way: mesh.metric(f"kvtransfer-{role}", "kvmesh:transfer_bytes_total", direction=way)
        for role, way in (("prefill", "out"), ("decode", "in"))
    }
    answer = ask(client, "What is the capital of France? " + "Answer in one short sentence. " * 4, max_tokens=24)
    assert "Paris" in answer.text
    served = answer.served
    assert served.transport == "shm"
    assert served.transfer_bytes > 1 << 20
    decode, prefill = mesh.container("decode"), mesh.container("prefill")
    assert served.decode_worker.startswith(decode.short)
    assert served.prefill_worker.startswith(prefill.short)
    for role, way in (("prefill", "out"), ("decode", "in")):
        moved = mesh.metric(f"kvtransfer-{role}", "kvmesh:transfer_bytes_total", transport="shm", direction=way)
        assert moved - before[way] == served.transfer_bytes
    record_property(
        "measured", f"{served.transfer_bytes} bytes of KV by {served.transport}, {served.ttft_ms:.0f} ms to a token"
    )


def test_over_http_by_a_client_that_nobody_here_wrote(mesh: Mesh) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{mesh.http}/v1", api_key="none", timeout=WAIT_S) as client:
        assert [model.id for model in client.models.list()]
        question = [{"role": "user", "content": "Name the capital of Italy, in one short sentence please. Thank you!"}]
        whole = client.chat.completions.create(model="auto", messages=question, temperature=0, max_tokens=24)
        assert "Rome" in (whole.choices[0].message.content or "")
        assert whole.usage is not None
        assert whole.usage.completion_tokens > 0
        stream = client.chat.completions.create(
            model="auto", messages=question, temperature=0, max_tokens=24, stream=True
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert said == whole.choices[0].message.content


def test_the_answer_is_remembered_in_redis(client: SyncClient) -> None:
    """So the password that the mesh made for itself is the right one at both ends."""
    question = [("user", "What is the capital of France?")]
    seen = []

    def served() -> str:
        stream = client.chat(question, temperature=0.0, max_tokens=48, timeout_s=WAIT_S)
        stream.result()
        seen.append((stream.finished.served.cache, stream.finish_reason))
        return str(stream.finished.served.cache)

    until(lambda: served() == "exact", f"the second answer comes from the cache: {seen}", timeout_s=60)


def kill_in_the_middle(mesh: Mesh, client: SyncClient, after: int = 4) -> tuple[Container, Answer]:
    """SIGKILL of the decode container that a stream comes from, once it has said something."""
    killed: list[Container] = []
    # What takes time is done before: the stream does not wait for us.
    workers = mesh.containers("decode")

    def kill(number: int) -> None:
        if number == after:
            running = [c for c in workers if mesh.value(c, "kvmesh:num_requests_running")]
            assert len(running) == 1, "one worker runs the stream, or it was over too soon"
            mesh.kill(running[0])
            killed.append(running[0])

    answer = ask(client, long_question("Norway"), max_tokens=LONG, pieces=kill)
    return killed[0], answer


def test_the_only_decode_worker_is_killed_and_its_stream_goes_on(
    mesh: Mesh, client: SyncClient, told: Answer, record_property: Tell
) -> None:
    started = time.monotonic()
    victim, answer = kill_in_the_middle(mesh, client)
    assert answer.text == told.text
    assert answer.served.heals >= 1
    record_property(
        "measured", f"one decode worker killed: the stream was whole after {time.monotonic() - started:.1f} s"
    )
    assert mesh.container("decode").id == victim.id, "it is the same container, which the engine started again"
    paired(mesh)


def two_decode_workers(mesh: Mesh) -> float:
    """Scaled where it is not yet; seconds."""
    took = 0.0
    if len(mesh.containers("decode")) < 2:
        took = mesh.up(KVMESH_DECODE_REPLICAS="2")
    wait_attached(mesh, decode=2, prefill=1)
    paired(mesh)
    return took


def test_scaling_decode_is_seen_by_the_router(mesh: Mesh, client: SyncClient, record_property: Tell) -> None:
    took = two_decode_workers(mesh)
    served: set[str] = set()

    def both() -> bool:
        def one(number: int) -> None:
            with mesh.client() as mine:
                served.add(ask(mine, long_question(f"Scaling {number}"), max_tokens=4).served.decode_worker)

        threads = [threading.Thread(target=one, args=(len(served) * 10 + n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return len(served) == 2

    until(both, "both decode workers serve")
    names = {container.short for container in mesh.containers("decode")}
    assert {worker.partition("-")[0] for worker in served} == names
    record_property("measured", f"decode scaled from 1 to 2 in {took:.1f} s")


@pytest.mark.parametrize("round_", range(KILLS))
def test_one_of_two_decode_workers_is_killed(mesh: Mesh, client: SyncClient, told: Answer, round_: int) -> None:
    two_decode_workers(mesh)
    _, answer = kill_in_the_middle(mesh, client, after=4 + 5 * round_)
    assert answer.text == told.text
    assert answer.served.heals >= 1
    mesh.wait_healthy("decode", count=2)
    wait_attached(mesh, decode=2)
    paired(mesh)


@pytest.mark.parametrize("service", ["kvtransfer-decode", "kvtransfer-prefill"] * KILLS)
def test_a_sidecar_is_killed(mesh: Mesh, client: SyncClient, service: str) -> None:
    mesh.kill(mesh.container(service))
    # Meanwhile requests are served, with pages moved or without.
    assert ask(client, long_question(f"Sidecars {service} {time.monotonic_ns()}"), max_tokens=4).text
    paired(mesh)
    assert moves(mesh, client, f"After {service} {time.monotonic_ns()}").served.transport == "shm"
    for worker in mesh.containers("decode", "prefill"):
        until(lambda worker=worker: not draining(mesh, worker), f"no page of {worker.short} waits for the dead")


def draining(mesh: Mesh, worker: Container) -> float:
    return sum(
        value
        for name, labels, value in mesh.metrics(worker)
        if name == "kvmesh:kv_pages" and labels.get("state") in ("draining", "exposed")
    )


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_redis_is_away(mesh: Mesh, client: SyncClient, how: str) -> None:
    redis = mesh.container("redis")
    if how == "pause":
        mesh.docker("pause", redis.id)
        try:
            assert ask(client, long_question(f"Redis {time.monotonic_ns()}"), max_tokens=4).text
        finally:
            mesh.docker("unpause", redis.id)
    else:
        mesh.kill(redis)
        assert ask(client, long_question(f"Redis {time.monotonic_ns()}"), max_tokens=4).text
    mesh.wait_healthy("redis", "router", "gateway")


def test_prefill_stands_still(mesh: Mesh, client: SyncClient, record_property: Tell) -> None:
    """`docker pause`: its connections stay open and nobody answers on them."""
    prefill = mesh.container("prefill")
    mesh.docker("pause", prefill.id)
    try:
        started = time.monotonic()
        answer = ask(client, long_question(f"Pauses {time.monotonic_ns()}"), max_tokens=4)
        assert answer.text
        record_property("measured", f"prefill paused: an answer after {time.monotonic() - started:.1f} s")
    finally:
        mesh.docker("unpause", prefill.id)
    mesh.wait_healthy("prefill")
    wait_attached(mesh, prefill=1, decode=len(mesh.containers("decode")))
    moves(mesh, client, f"After a pause {time.monotonic_ns()}")


class Load:
    """Clients that ask without a pause. Each connects once more where a connection ended, and never otherwise."""

    def __init__(self, mesh: Mesh, clients: int = 2) -> None:
        self.mesh = mesh
        self.answers = 0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self, number: int) -> None:
        count = 0
        with self.mesh.client(attempts=1) as client:
            while not self._stop.is_set():
                count += 1
                try:
                    ask(client, long_question(f"Load {number} {count} {time.monotonic_ns()}", lines=3), max_tokens=8)
                    self.answers += 1
                except KvmeshError as error:
                    self.errors.append(f"{type(error).__name__}: {error.message}")

    def goes_on(self, answers: int = 4) -> None:
        """So many more answers."""
        wanted = self.answers + answers
        until(lambda: self.answers >= wanted, f"{answers} more answers (errors: {self.errors[-3:]})")


def test_every_service_but_the_door_restarts_under_load(mesh: Mesh, record_property: Tell) -> None:
    """One container after the other, in good order (SIGTERM, its drain, start, healthy). No accepted request fails."""
    order = ["router", "kvtransfer-prefill", "prefill", "decode", "kvtransfer-decode"] if SOAK else ["router", "decode"]
    two_decode_workers(mesh)
    with Load(mesh) as load:
        load.goes_on()
        for service in order:
            for container in mesh.containers(service):
                mesh.docker("restart", "-t", "40", container.id, timeout_s=WAIT_S)
                mesh.wait_healthy(service)
                load.goes_on(2)
    assert not load.errors
    record_property("measured", f"{', '.join(order)} restarted under load: {load.answers} answers, no error")
    wait_attached(mesh, prefill=1, decode=len(mesh.containers("decode")))
    paired(mesh)


def test_kv_goes_by_tcp_where_it_is_asked_to(mesh: Mesh, client: SyncClient) -> None:
    """Containers find each other by the names that they give themselves."""
    mesh.up("kvtransfer-prefill", "kvtransfer-decode", KVMESH_TRANSPORTS="tcp")
    paired(mesh)
    assert moves(mesh, client, "Across the network").served.transport == "tcp"


def test_everything_is_healthy_and_bounded_at_the_end(mesh: Mesh) -> None:
    for container in mesh.wait_healthy():
        assert container.state == "running", container
    # Each sidecar of today has its socket there, and nobody of yesterday.
    for role in ("prefill", "decode"):
        sidecar = mesh.containers(f"kvtransfer-{role}")[0]
        script = f"import os; print(*sorted(f for f in os.listdir('/run/kvtransfer/{role}') if f.endswith('.sock')))"
        sockets = mesh.docker("exec", sidecar.id, "python3", "-c", script).split()
        alive = {container.short for container in mesh.containers(f"kvtransfer-{role}")}
        assert {name.partition("-")[0] for name in sockets} >= alive
        assert len(alive) == len(mesh.containers(role))
    status = mesh.docker("exec", mesh.container("gateway").id, "python3", "-c", "print(open('/proc/1/status').read())")
    assert re.search(r"^Uid:\s+10001\s+10001\s+10001", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\s+0+$", status, re.MULTILINE)


def test_down_leaves_nothing(mesh: Mesh, record_property: Tell) -> None:
    assert len(mesh.containers()) >= len(SERVICES)
    started = time.monotonic()
    mesh.down()
    assert mesh.left() == []
    record_property("measured", f"down in {time.monotonic() - started:.1f} s")
