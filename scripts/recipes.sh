#!/usr/bin/env bash
# Lets recipes of Tinker's cookbook train over a real server, on data made here.
set -euo pipefail

case ${1:-} in
    -h | --help)
        cat <<'TEXT'
usage: scripts/recipes.sh [OPTIONS of recipes.py]

Installs Tinker's cookbook into .cache/recipes, makes SmolLM2-135M-Instruct in .cache, and runs
scripts/recipes.py: a line for each recipe, exit status 1 if one fails. The recipes are those of the
package, unchanged. No hub is needed: their data sets are made, with the same names and fields.
TEXT
        exit 0
        ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh" train-api

MODEL=.cache/smollm2-135m-instruct
RECIPES=.cache/recipes
"$PYTHON" scripts/prepare_smollm2.py --output "$MODEL"
[ -x "$RECIPES/bin/python" ] || "$PYTHON" -m venv "$RECIPES"
VENV=$RECIPES install 'tinker-cookbook[math-rl]>=0.6'
exec "$PYTHON" scripts/recipes.py --recipes "$RECIPES/bin/python" --model "$MODEL" "$@"
