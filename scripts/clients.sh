#!/usr/bin/env bash
# Lets client libraries of both APIs talk to a real server.
set -euo pipefail

case ${1:-} in
    -h | --help)
        cat <<'TEXT'
usage: scripts/clients.sh [OPTIONS of clients.py]

Installs client libraries into .cache/clients, makes SmolLM2-135M-Instruct in .cache, and runs
scripts/clients.py: a line for each client and feature, exit status 1 if one fails.
TEXT
        exit 0
        ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh" serve

MODEL=.cache/smollm2-135m-instruct
CLIENTS=.cache/clients
"$PYTHON" scripts/prepare_smollm2.py --output "$MODEL"
[ -x "$CLIENTS/bin/python" ] || "$PYTHON" -m venv "$CLIENTS"
VENV=$CLIENTS install openai anthropic langchain-openai langchain-anthropic instructor \
    'pydantic-ai-slim[openai]' openai-agents llm
exec "$CLIENTS/bin/python" scripts/clients.py --server "$PYTHON" --model "$MODEL" "$@"
