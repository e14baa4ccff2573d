#!/usr/bin/env bash
# Sets everything up on a bare machine, then runs all checks: format, lint, types, tests.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'TEXT'
usage: scripts/test.sh [PYTEST OPTION ...]

Makes a virtual environment in .venv, installs the project with all that its tests need, and runs
ruff, mypy and pytest. Options go to pytest: scripts/test.sh -k schedules

PYTHON=...          the Python to make the environment with (3.11 or newer)
SHARDMLX_VENV=...   another place for the environment
TEXT
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh" dev,demo,tokenizer

# Network namespaces stand for several hosts in tests/lab, which is skipped without them.
install_iproute2() {
    [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ] && ! command -v ip >/dev/null &&
        command -v apt-get >/dev/null || return 0
    echo "Installing iproute2"
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends iproute2) >/dev/null 2>&1 || echo "iproute2 is not installed: tests/lab will be skipped"
}

install_iproute2

"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest "$@"
