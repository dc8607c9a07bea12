#!/usr/bin/env bash
# `buf breaking` against main as it was: the commit before this work where there is one. Without any earlier protos there
# is nothing to break.
set -euo pipefail
buf=$1
cd "$(dirname "$0")/.."
base=${KVMESH_BREAKING_BASE:-}
if [ -z "$base" ]; then
    if git rev-parse -q --verify origin/main >/dev/null 2>&1 && [ "$(git rev-parse origin/main)" != "$(git rev-parse HEAD)" ]; then
        base=origin/main
    else
        base=$(git rev-parse -q --verify HEAD~1 2>/dev/null || true)
    fi
fi
if [ -z "$base" ] || ! git cat-file -e "$base:protos/kvmesh/v1/inference.proto" 2>/dev/null; then
    echo "buf breaking: no earlier protos to compare with"
    exit 0
fi
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" protos buf.yaml | tar -x -C "$before"
"$buf" breaking --against "$before"
