#!/bin/sh
# The last stage of every image, over its base: the user 10001, and no package installer of Python's.
set -eu
useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin --no-log-init kvmesh
# Debian's own Python has pip as packages, the official image as files.
for package in python3-pip python3-wheel python3-setuptools python3-venv python3.11-venv python3-pip-whl \
    python3-setuptools-whl; do
    if dpkg -s "$package" >/dev/null 2>&1; then dpkg --purge --force-depends "$package" >/dev/null 2>&1; fi
done
python3 - <<'PYTHON'
import shutil
import sysconfig
from pathlib import Path

for scheme in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
    for name in ("pip", "setuptools", "wheel", "_distutils_hack", "pkg_resources"):
        for found in (*Path(scheme).glob(name), *Path(scheme).glob(f"{name}-*.dist-info")):
            shutil.rmtree(found)
    Path(scheme, "distutils-precedence.pth").unlink(missing_ok=True)
shutil.rmtree(Path(sysconfig.get_path("stdlib"), "ensurepip"), ignore_errors=True)
for folder in ("/usr/local/bin", sysconfig.get_path("scripts")):
    for found in (*Path(folder).glob("pip*"), *Path(folder).glob("wheel"), *Path(folder).glob("easy_install*")):
        found.unlink(missing_ok=True)
PYTHON
rm -rf /var/cache/debconf/* /var/lib/dpkg/*-old /var/log/* /root/.cache /tmp/*
