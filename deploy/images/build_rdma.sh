#!/bin/sh
# rdma-core with pyverbs, built in place at $1 from PyPI's sdist. Only what the sidecar loads is left there: libibverbs,
# librdmacm, the providers rxe, mlx5 and efa, and of pyverbs what `pyverbs.qp` and
# EFA's module import. Debian's libnl goes to $1-libs.
set -eu
target=$1
locks=$(dirname "$0")
work=$(mktemp -d)
python3 -m venv "$work/venv"
uv pip install -q --python "$work/venv" --require-hashes --no-deps --no-build -r "$locks/rdma-build.txt"
PATH=$work/venv/bin:$PATH
export PATH
# pip reads an sdist's metadata with the build tools that are installed here, by their hashes.
"$work/venv/bin/python" -m pip download -q --disable-pip-version-check --require-hashes --no-deps --no-build-isolation \
    --no-binary pyverbs -d "$work" -r "$locks/pyverbs.txt"
mkdir -p "$work/sdist" "$target-libs"
tar -xzf "$work"/pyverbs-*.tar.gz -C "$work/sdist" --strip-components=1
tree=$work/sdist/rdma-core
# An extension finds CPython's symbols in the interpreter; the library of Debian's is not in the image.
# What Cython writes only passes calls on, and there is much of it: -O2 is half the build and gains nothing.
# shellcheck disable=SC2016
sed -i -e 's/ ${PYTHON_LIBRARIES} / -Wl,-z,undefs /' -e 's/\(${NO_VAR_TRACKING_FLAGS}\)"/\1 -O1"/' \
    "$tree/buildlib/pyverbs_functions.cmake"
cmake -S "$tree" -B "$target" -GNinja -DIN_PLACE=1 -DNO_MAN_PAGES=1 -DCMAKE_BUILD_TYPE=Release \
    '-DCMAKE_C_FLAGS_RELEASE=-O2 -DNDEBUG' -DPYTHON_EXECUTABLE="$work/venv/bin/python" \
    -DCYTHON_EXECUTABLE="$work/venv/bin/cython" >"$work/cmake.log" || { tail -n 30 "$work/cmake.log" >&2; exit 1; }
ninja -C "$target" -t targets all | cut -d: -f1 |
    grep -E '^(python/pyverbs/[^/]*|python/pyverbs/providers/efa/[^/]*|lib/lib(ibverbs|rdmacm|mlx5|efa|rxe)[^/]*)\.so' |
    grep -vE '/(spec|fork|mem_alloc|dma_util)\.' | sort -u >"$work/targets"
xargs ninja -C "$target" <"$work/targets" >"$work/ninja.log" || { tail -n 30 "$work/ninja.log" >&2; exit 1; }

# The rest goes: objects, generated C, providers that were not built.
mv "$target" "$work/built"
mkdir -p "$target/lib" "$target/etc/libibverbs.d" "$target/python/pyverbs/providers/efa"
for path in "$work"/built/lib/*.so*; do
    if [ -e "$path" ]; then cp -a "$path" "$target/lib/"; fi
done
for provider in rxe mlx5 efa; do
    cp "$work/built/etc/libibverbs.d/$provider.driver" "$target/etc/libibverbs.d/"
done
for folder in . providers providers/efa; do
    cp "$tree/pyverbs/$folder"/*.py "$target/python/pyverbs/$folder/"
    find "$work/built/python/pyverbs/$folder" -maxdepth 1 -name '*.so' -exec cp {} "$target/python/pyverbs/$folder/" \;
done
find "$target" -name '*.so*' -type f -exec strip --strip-unneeded {} +
cp "$tree"/COPYING.* "$target/"
"$work/venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$target/python"
sed -n 's/^pyverbs==\([^ ]*\).*/\1/p' "$locks/pyverbs.txt" >"$target/VERSION"
cp -L /usr/lib/*/libnl-3.so.200 /usr/lib/*/libnl-route-3.so.200 "$target-libs/"
if readelf -d "$target"/python/pyverbs/*.so | grep libpython; then exit 1; fi
PYTHONPATH=$target/python python3 -c 'import pyverbs.qp, pyverbs.providers.efa.efadv'
rm -rf "$work"
