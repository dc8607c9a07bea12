"""`helm test` asks the mesh a question: here the pod's own command runs, against a gateway of ten lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from chart_kit import ROOT, Manifest, at, by_name, ci_render, of_kind, render
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc


def test_pod(manifests: list[Manifest]) -> Manifest:
    return by_name(manifests, "Pod", "mesh-kvmesh-test")


test_pod.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Gateway(inference_pb2_grpc.InferenceServicer):
    """Answers what it is told to, and remembers who asked what."""

    answer: str = "Paris."
    asked: list[tuple[pb.ChatRequest, dict[str, Any]]] = field(default_factory=list)

    def Chat(self, request: pb.ChatRequest, context: grpc.ServicerContext) -> Iterator[pb.ChatResponse]:
        self.asked.append((request, dict(context.invocation_metadata())))
        if not self.answer:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")
        yield pb.ChatResponse(event=pb.GenerateEvent(accepted=pb.Accepted(request_id="r", model="m")))
        yield pb.ChatResponse(event=pb.GenerateEvent(delta=pb.Delta(text=self.answer, finish_reason=1)))
        usage = pb.Usage(prompt_tokens=9, completion_tokens=3)
        yield pb.ChatResponse(event=pb.GenerateEvent(finished=pb.Finished(usage=usage)))


@pytest.fixture
def gateway() -> Iterator[tuple[Gateway, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = Gateway()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(10)


def run(pod: Manifest, address: str) -> subprocess.CompletedProcess[str]:
    """The container's command with its own variables, but for where the gateway is."""
    (container,) = pod["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "python"
    given = {item["name"]: item.get("value", "secret-key") for item in container["env"]}
    assert given["ASK_ADDRESS"] == "dns:///mesh-kvmesh-gateway.serving.svc.cluster.local:8080"
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **given, "ASK_ADDRESS": address, "PYTHONPATH": str(ROOT / "libs")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_asks_the_question_and_shows_the_answer(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    values = {"helmTest": {"question": 'What\'s "2 + 2"?\n日本', "apiKeySecret": {"name": "key"}}}
    done = run(test_pod(render(values)), address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Paris.\n9 tokens asked, 3 answered\n"
    ((request, metadata),) = servicer.asked
    assert request.messages[0].content == values["helmTest"]["question"]
    assert request.sampling.max_tokens == 64
    assert metadata["authorization"] == "Bearer secret-key"


def test_no_answer_is_a_failure(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    servicer.answer = ""
    done = run(test_pod(render({})), address)
    assert done.returncode == 1
    assert "no answer: UNAUTHENTICATED" in done.stderr


def test_it_trusts_the_gateway_s_authority() -> None:
    for public, secret, name in (
        ({}, "mesh-kvmesh-gateway-tls", "mesh-kvmesh.serving.svc"),
        (
            {"mode": "own", "certManager": {"issuerRef": {"name": "public"}, "dnsNames": ["*.api.example"]}},
            "mesh-kvmesh-public-tls",
            "api.example",
        ),
    ):
        tls = {"enabled": True, "certManager": {"enabled": True}, "public": public}
        pod = test_pod(render({"tls": tls}))
        (container,) = pod["spec"]["containers"]
        given = {item["name"]: item.get("value") for item in container["env"]}
        (volume,) = (item for item in pod["spec"]["volumes"] if item["name"] == "tls")
        assert volume["secret"]["secretName"] == secret
        assert [item["path"] for item in volume["secret"]["items"]] == ["ca.crt"], "no key of the gateway's"
        assert given["ASK_SERVER_NAME"] == name
        assert given["ASK_CA"] == "/etc/kvmesh/tls/ca.crt"
    off = test_pod(render({"tls": {"enabled": True, "secretName": "all", "public": {"mode": "off"}}}))
    assert "ASK_CA" not in {item["name"] for item in off["spec"]["containers"][0]["env"]}


def test_it_is_a_hook_that_ends() -> None:
    pod = test_pod(ci_render("full"))
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["activeDeadlineSeconds"] == 180
    assert "kvmesh.io/tier" not in at(pod, "metadata", "labels"), "no policy of the mesh's is about it"
    assert not of_kind(render({"helmTest": {"enabled": False}}), "Pod")
