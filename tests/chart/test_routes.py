"""Routes: streams pass unbuffered, no timeout is shorter than an answer, and inner ports are not led to."""

from __future__ import annotations

from typing import Any

import pytest

from chart_kit import Manifest, Refused, by_name, ci_render, of_kind, render, render_text

PARENTS = [{"name": "public", "namespace": "gateways"}]
NGINX = "nginx.ingress.kubernetes.io/"


def ports_of(manifests: list[Manifest], name: str) -> set[int]:
    return {port["port"] for port in by_name(manifests, "Service", name)["spec"]["ports"]}


def routes(**values: Any) -> dict[str, Any]:
    return {"routes": values}


def test_http_routes_wait_as_long_as_an_answer_may_take() -> None:
    for total, timeout in ((600, "630s"), (7200, "7230s"), (0.5, None), (90.5, "121s")):
        values = routes(httpRoute={"enabled": True, "parentRefs": PARENTS})
        values["limits"] = {"totalSeconds": total, "ttftSeconds": min(total, 60)}
        if timeout is None:
            continue
        (route,) = of_kind(render(values), "HTTPRoute")
        (rule,) = route["spec"]["rules"]
        assert rule["timeouts"] == {"request": timeout, "backendRequest": timeout}


@pytest.mark.parametrize("kind", ["httpRoute", "ingress"])
def test_a_timeout_that_would_cut_answers_is_refused(kind: str) -> None:
    own = {"enabled": True, "timeoutSeconds": 60, **({"parentRefs": PARENTS} if kind == "httpRoute" else {})}
    with pytest.raises(Refused, match=rf"routes.{kind}.timeoutSeconds is 60: below limits.totalSeconds \(600\)"):
        render_text(routes(**{kind: own}))
    assert render(routes(**{kind: {**own, "timeoutSeconds": 600}}))


def test_routes_lead_to_the_public_ports() -> None:
    manifests = ci_render("full")
    service = "mesh-kvmesh-gateway"
    (http,) = of_kind(manifests, "HTTPRoute")
    (grpc,) = of_kind(manifests, "GRPCRoute")
    for route, port in ((http, 8000), (grpc, 8080)):
        (rule,) = route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        assert backend == {"name": service, "port": port}
        assert port in ports_of(manifests, service)
        assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways", "sectionName": "https"}]
    assert http["spec"]["hostnames"] == ["api.example"]
    ingresses = {item["metadata"]["name"]: item for item in of_kind(manifests, "Ingress")}
    assert ingresses.keys() == {service, f"{service}-grpc"}
    for name, port in ((service, 8000), (f"{service}-grpc", 8080)):
        (rule,) = ingresses[name]["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": service, "port": {"number": port}}
    assert 9090 not in ports_of(manifests, service), "metrics are not public"
    assert 8081 not in ports_of(manifests, service)


@pytest.mark.parametrize(
    ("tls", "protocols"),
    [({}, {"HTTP", "GRPC"}), ({"enabled": True, "secretName": "all"}, {"HTTPS", "GRPCS"}),
     ({"enabled": True, "secretName": "all", "public": {"mode": "off"}}, {"HTTP", "GRPC"})],
)  # fmt: skip
def test_ingress_streams_and_speaks_what_the_gateway_does(tls: dict[str, Any], protocols: set[str]) -> None:
    manifests = render({**routes(ingress={"enabled": True, "grpc": {"enabled": True}}), "tls": tls})
    items = of_kind(manifests, "Ingress")
    for item in items:
        annotations = item["metadata"]["annotations"]
        assert annotations[NGINX + "proxy-buffering"] == "off"
        assert annotations[NGINX + "proxy-request-buffering"] == "off"
        assert int(annotations[NGINX + "proxy-read-timeout"]) >= 600
        assert int(annotations[NGINX + "proxy-send-timeout"]) >= 600
        # A retry of the proxy's would be a second answer.
        assert annotations[NGINX + "proxy-next-upstream"] == "off"
        assert "host" not in item["spec"]["rules"][0]
    assert {item["metadata"]["annotations"][NGINX + "backend-protocol"] for item in items} == protocols


def test_annotations_win_and_another_controller_gets_none() -> None:
    own = {NGINX + "proxy-body-size": "1m"}
    (item,) = of_kind(render(routes(ingress={"enabled": True, "annotations": own})), "Ingress")
    assert item["metadata"]["annotations"][NGINX + "proxy-body-size"] == "1m"
    assert item["metadata"]["annotations"][NGINX + "proxy-buffering"] == "off"
    (item,) = of_kind(render(routes(ingress={"enabled": True, "controller": "none"})), "Ingress")
    assert "annotations" not in item["metadata"]


def test_routes_without_their_server_are_refused() -> None:
    http_off = {"gateway": {"http": {"enabled": False}}}
    for values in (
        routes(httpRoute={"enabled": True, "parentRefs": PARENTS}) | http_off,
        routes(ingress={"enabled": True}) | http_off,
    ):
        with pytest.raises(Refused, match=r"gateway\.http\.enabled"):
            render_text(values)
    with pytest.raises(Refused, match=r"set gateway\.enabled"):
        render_text(routes(grpcRoute={"enabled": True, "parentRefs": PARENTS}) | {"gateway": {"enabled": False}})


def test_no_route_unless_asked_for() -> None:
    assert not of_kind(render({}), "HTTPRoute", "GRPCRoute", "Ingress")
