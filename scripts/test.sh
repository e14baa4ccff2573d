#!/usr/bin/env bash
# Sets everything up on a bare machine, then runs all checks: format, lint, types, tests. With
# options only the tests that they name.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'TEXT'
usage: scripts/test.sh [PYTEST OPTION ...]

Makes a virtual environment in .venv, installs the project with all that its tests need, and runs
ruff, mypy and all tests, with four workers. With options it runs pytest alone, in one process:
scripts/test.sh -k schedules

PYTHON=...          the Python to make the environment with (3.11 or newer)
SHARDMLX_VENV=...   another place for the environment
TEXT
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh" dev,demo,tokenizer,serve,train-api,evaluate,services

# Installs what some tests need, and are skipped without: TESTS PROGRAM PACKAGE...
install_for() {
    local tests=$1 program=$2
    shift 2
    command -v "$program" >/dev/null && return
    if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing $*"
        if (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends "$@") >/dev/null 2>&1; then
            return
        fi
    fi
    echo "$program is not installed: $tests will be skipped. On Debian: sudo apt-get install $*"
}

# Network namespaces stand for several hosts. Their tools are not on everybody's PATH.
PATH=$PATH:/usr/sbin:/sbin
install_for tests/lab tc iproute2
# A system that starts what is installed would open this machine for logins: it has an sshd already,
# or its owner wants none.
if [ ! -d /run/systemd/system ]; then
    install_for tests/lab/test_logins_lab.py sshd openssh-server openssh-client
fi
install_for tests/lab/test_logins_lab.py fish fish
install_for tests/lab/test_logins_lab.py tcsh tcsh
install_for tests/browser chromedriver chromium chromium-driver

# Compiled once: every rank that a test starts reads the modules anew.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$ROOT/.cache/python

# On Linux MLX has g++ compile its kernels, some 120 in all tests. Most of that time goes into one
# header, which g++ takes from here when it is compiled already.
precompile_header() {
    local include header
    include=$("$PYTHON" -c 'import mlx; print(list(mlx.__path__)[0])')/include
    header=$include/mlx/backend/cpu/compiled_preamble.h
    if [ -f "$header" ] && command -v g++ >/dev/null && [ ! -f "$header.gch" ]; then
        g++ -std=c++17 -O3 -Wall -fPIC -x c++-header -I"$include" "$header" 2>/dev/null ||
            rm -f "$header.gch"
    fi
}
[ "$(uname)" != Linux ] || precompile_header

if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
# More workers than cores: tests that start jobs wait for most of their time. The order is that of
# tests/conftest.py.
exec "$PYTHON" -m pytest -n 4 --no-loadscope-reorder
