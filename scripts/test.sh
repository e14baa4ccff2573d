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

"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest "$@"
