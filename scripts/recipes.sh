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

# All that the cookbook needs, but for the renderers of Inkling's models, which no recipe here uses:
# it asks for a release of them that PyPI does not have.
VENV=$RECIPES
install --no-deps 'tinker-cookbook>=0.6'
"$VENV/bin/python" - >"$VENV/needed.txt" <<'PYTHON'
import importlib.metadata

for line in importlib.metadata.requires("tinker-cookbook"):
    needed, _, marker = line.partition(";")
    is_wanted = not marker or "'math-rl'" in marker.replace('"', "'")
    if is_wanted and not needed.startswith("tml-renderers"):
        print(needed.strip())
PYTHON
install -r "$VENV/needed.txt"
exec "$PYTHON" scripts/recipes.py --recipes "$RECIPES/bin/python" --model "$MODEL" "$@"
