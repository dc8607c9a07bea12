"""TLS and mTLS with certificates made here, mesh authentication, and the tenant of a hop."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from kvmesh import errors
from kvmesh.config import ServiceSettings, TlsSettings
from kvmesh.rpc import Access, MeshAuth, MeshToken, raising, tenant_from, tenant_metadata
from kvmesh.rpc.auth import MESH_TOKEN_KEY
from rpc_echo import Text

TOKEN = "correct-horse-battery-staple"


class Files:
    """A certificate authority and certificates of it as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.ca = trustme.CA()
        self.ca_file = folder / f"{name}-ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, label: str, *identities: str) -> tuple[Path, Path]:
        issued = self.ca.issue_cert(*identities)
        cert, key = self.folder / f"{self.name}-{label}.pem", self.folder / f"{self.name}-{label}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, "one")


async def whoami(request, context):
    return Text(value=tenant_from(context))


def server_tls(files: Files, mtls: bool = False) -> dict:
    cert, key = files.issue("server", "localhost", "127.0.0.1")
    return {"cert": cert, "key": key, "ca": files.ca_file if mtls else None, "require_client_cert": mtls}


async def test_tls_verifies_the_server(mesh, files, tmp_path) -> None:
    server = await mesh.serve(unary=whoami, settings={"tls": server_tls(files)})
    assert (await mesh.echo(server, tls=TlsSettings(ca=files.ca_file)).unary(Text())).value == "local"
    stranger = Files(tmp_path, "two")
    with pytest.raises(errors.Unavailable), raising():
        await mesh.echo(server, tls=TlsSettings(ca=stranger.ca_file)).unary(Text())
    with pytest.raises(errors.Unavailable), raising():
        await mesh.echo(server).unary(Text())


async def test_mtls_demands_a_certificate_and_carries_the_tenant(mesh, files, tmp_path) -> None:
    server = await mesh.serve(unary=whoami, settings={"tls": server_tls(files, mtls=True)})
    cert, key = files.issue("client", "gateway.mesh")
    good = TlsSettings(ca=files.ca_file, cert=cert, key=key)
    answer = await mesh.echo(server, tls=good).unary(Text(), metadata=tenant_metadata("acme"))
    assert answer.value == "acme"
    with pytest.raises(errors.Unavailable), raising():
        await mesh.echo(server, tls=TlsSettings(ca=files.ca_file)).unary(Text())
    strange_cert, strange_key = Files(tmp_path, "two").issue("client", "gateway.mesh")
    with pytest.raises(errors.Unavailable), raising():
        await mesh.echo(server, tls=TlsSettings(ca=files.ca_file, cert=strange_cert, key=strange_key)).unary(Text())


async def test_new_certificate_files_are_used_and_broken_ones_are_not(mesh, files, tmp_path, monkeypatch) -> None:
    import kvmesh.rpc.tls as tls_module

    original = tls_module.ReloadingFile
    monkeypatch.setattr(tls_module, "ReloadingFile", lambda *a, **k: original(*a, **{**k, "interval_s": 0.0}))
    tls = server_tls(files)
    server = await mesh.serve(unary=whoami, settings={"tls": tls})
    old = TlsSettings(ca=files.ca_file)
    assert (await mesh.echo(server, tls=old).unary(Text())).value == "local"

    tls["cert"].write_text("-----BEGIN GARBAGE")
    assert (await mesh.echo(server, tls=old).unary(Text())).value == "local"

    second = Files(tmp_path, "two")
    cert, key = second.issue("server", "localhost", "127.0.0.1")
    key.replace(tls["key"])
    cert.replace(tls["cert"])
    new = TlsSettings(ca=second.ca_file)
    assert (await mesh.echo(server, tls=new).unary(Text())).value == "local"
    with pytest.raises(errors.Unavailable), raising():
        await mesh.echo(server, tls=old).unary(Text())


async def test_missing_certificate_files_are_named(mesh, files, tmp_path) -> None:
    tls = server_tls(files) | {"cert": tmp_path / "nowhere.pem"}
    with pytest.raises(errors.FailedPrecondition, match=r"nowhere\.pem"):
        await mesh.serve(unary=whoami, settings={"tls": tls})
    (tmp_path / "nowhere.pem").write_text("not a certificate")
    with pytest.raises(errors.FailedPrecondition, match="not a PEM file"):
        await mesh.serve(unary=whoami, settings={"tls": tls})


async def test_the_mesh_token_opens_inner_services(mesh, write_token) -> None:
    settings = {"mesh_token_file": write_token(TOKEN)}
    server = await mesh.serve(unary=whoami, settings=settings)
    token = MeshToken(settings["mesh_token_file"])
    echo = mesh.echo(server, token=token)
    assert (await echo.unary(Text())).value == "local"
    assert (await echo.unary(Text(), metadata=tenant_metadata("acme"))).value == "acme"
    wrong = [(), ((MESH_TOKEN_KEY, "wrong"),), ((MESH_TOKEN_KEY, TOKEN + "x"),), ((MESH_TOKEN_KEY, TOKEN[:-1]),)]
    for metadata in wrong:
        with pytest.raises(errors.Unauthenticated), raising():
            await mesh.echo(server).unary(Text(), metadata=metadata)


async def test_streams_are_guarded_too(mesh, write_token) -> None:
    reached = []

    async def stream(request, context):
        reached.append(1)
        yield Text()

    server = await mesh.serve(stream=stream, settings={"mesh_token_file": write_token(TOKEN)})
    with pytest.raises(errors.Unauthenticated), raising():
        async for _ in mesh.echo(server).stream(Text(), timeout=60):
            pass
    assert not reached


async def test_public_services_do_not_ask_for_the_mesh_token(mesh, write_token) -> None:
    server = await mesh.serve(Access.PUBLIC, unary=whoami, settings={"mesh_token_file": write_token(TOKEN)})
    assert (await mesh.echo(server).unary(Text())).value == "local"


@pytest.mark.parametrize("access", [Access.INNER, Access.PUBLIC])
async def test_a_tenant_is_not_believed_on_an_unproven_hop(mesh, access, write_token) -> None:
    """Also not on a public service of a mesh with a token: there the caller is a client, not a member."""
    settings = {"mesh_token_file": write_token(TOKEN)} if access is Access.PUBLIC else {}
    server = await mesh.serve(access, unary=whoami, settings=settings)
    echo = mesh.echo(server, token=MeshToken(write_token(TOKEN)))
    with pytest.raises(errors.Unauthenticated), raising():
        await echo.unary(Text(), metadata=tenant_metadata("acme"))
    assert (await echo.unary(Text(), metadata=tenant_metadata("local"))).value == "local"


@pytest.mark.parametrize("tenant", ["a b", "../x", "", "x" * 200, "-a"])
async def test_malformed_tenants_are_refused(mesh, write_token, tenant) -> None:
    path = write_token(TOKEN)
    server = await mesh.serve(unary=whoami, settings={"mesh_token_file": path})
    with pytest.raises(errors.Unauthenticated), raising():
        await mesh.echo(server, token=MeshToken(path)).unary(Text(), metadata=tenant_metadata(tenant))


async def test_tokens_rotate_without_a_break(mesh, write_token) -> None:
    path = write_token(TOKEN)
    token = MeshToken(path, interval_s=0.0)
    server = await mesh.serve(unary=whoami, auth=MeshAuth(token))
    client = mesh.echo(server, token=MeshToken(write_token(TOKEN, name="client")))
    newer = mesh.echo(server, token=MeshToken(write_token("n" * 40, name="newer")))
    write_token("n" * 40, TOKEN)
    assert token.current() == "n" * 40
    await client.unary(Text())
    await newer.unary(Text())
    write_token("n" * 40)
    with pytest.raises(errors.Unauthenticated), raising():
        await client.unary(Text())
    path.unlink()
    await newer.unary(Text())


@pytest.mark.parametrize("content", ["", "\n# nothing\n", "short", "ü" * 40])
def test_unusable_token_files_stop_the_start(write_token, content) -> None:
    with pytest.raises(ValueError, match="token"):
        MeshAuth.from_settings(ServiceSettings(mesh_token_file=write_token(content)))


def test_the_token_is_not_in_its_repr(write_token) -> None:
    token = MeshToken(write_token(TOKEN))
    assert TOKEN not in repr(token)
    assert TOKEN not in repr(ServiceSettings(mesh_token_file=write_token(TOKEN)))
