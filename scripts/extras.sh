#!/usr/bin/env bash
# Installs each extra of MLX's libraries, and each wrong pair, and shows what shardmlx says there.
set -euo pipefail

case ${1:-} in
    -h | --help)
        cat <<'TEXT'
usage: scripts/extras.sh [EXTRAS...]

For Linux. Builds the wheel, and installs it from the registry into a clean environment with each
extra: cpu, cuda12, cuda13, none of them, and pairs. EXTRAS are other sets, like cpu,cuda13. Shows the
libraries that are there, and the first lines of shardmlx doctor. Each set with CUDA takes 3 GB of
disk and a minute; environments are removed.
TEXT
        exit 0
        ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$(if [ -x .venv/bin/python ]; then echo .venv/bin/python; else echo python3; fi)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
"$PYTHON" -m pip wheel -q --no-deps -w "$WORK" .
WHEEL=$(echo "$WORK"/shardmlx-*.whl)

try() { # NAME PACKAGE..., installed one after the other
    local name=$1
    shift
    echo "== $name"
    "$PYTHON" -m venv "$WORK/env"
    for package; do
        "$WORK/env/bin/python" -m pip install -q --disable-pip-version-check "$package"
    done
    "$WORK/env/bin/python" -m pip list --disable-pip-version-check | grep -E '^(mlx|shardmlx)' | tr -s ' ' | sed 's/^/has /'
    (cd "$WORK" && "$WORK/env/bin/python" -m shardmlx.doctor --seconds 0.01) >"$WORK/said" 2>&1 && status=0 || status=$?
    sed -nE "s#$WORK/env#ENV#g; /(^|[^-])mlx|cuda|error/Ip" "$WORK/said" | cut -c 1-400
    echo "status $status"
    rm -rf "$WORK/env"
}

SETS=("$@")
[ $# -gt 0 ] || SETS=(none cpu cuda12 cuda13 cpu,cuda13 cuda13,cpu cuda12,cuda13)
for set in "${SETS[@]}"; do
    packages=()
    for extra in ${set//,/ }; do
        if [ "$extra" = none ]; then packages+=("$WHEEL"); else packages+=("$WHEEL[$extra]"); fi
    done
    try "$set" "${packages[@]}"
done
