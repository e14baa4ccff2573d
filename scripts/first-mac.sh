#!/usr/bin/env bash
# Finds out in about five minutes what of shardmlx holds on this machine, and writes a report.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'TEXT'
usage: scripts/first-mac.sh [--device auto|cpu|gpu] [--output FILE]

Sets up a virtual environment in .venv, and then, on this machine alone,

  1. examines it, with shardmlx doctor,
  2. compares its GPU with its CPU: layers, gradients, packed rows, two ranks, export,
  3. measures the layers of SmolLM2-135M, fine-tunes it on two ranks, and sets memory and time of a
     step beside what was predicted.

The report goes to FILE (first-mac.md). It has no names, addresses or paths: please send it, see its
last line. Nothing is downloaded but Python packages.
TEXT
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh" dev,demo
exec "$PYTHON" scripts/first_mac.py "$@"
