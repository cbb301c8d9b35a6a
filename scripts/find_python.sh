#!/bin/sh
# Prints the path of a Python that can run the project; says what is missing and fails if there is none.
# Looks in $PYTHON (which then must do), PATH, uv, and pyenv's versions, in this order; where there is none, uv may
# install one. Needs no environment variable.
set -eu

minimum="3.12"

# A name in PATH proves nothing (pyenv's shims, half-removed installations), so each candidate is run.
# The base interpreter is printed and not the one of an activated .venv, because .venv may be about to be made anew.
probe='
import sys
if sys.version_info < (3, 12):
    print("is Python %d.%d" % sys.version_info[:2])
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("has no venv module (Debian and Ubuntu: apt install python%d.%d-venv)" % sys.version_info[:2])
    sys.exit(1)
print(sys._base_executable)
'

tried=""

# Prints the candidate's path and ends the script if the candidate will do; notes the reason if it will not.
try() {
    command -v "$1" >/dev/null 2>&1 || return 0
    if answer=$("$1" -c "$probe" 2>/dev/null); then
        echo "$answer"
        exit 0
    fi
    tried="$tried
  $(command -v "$1"): ${answer:-does not run}"
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "PYTHON=$PYTHON cannot be used, Python $minimum or newer is needed:${tried:- there is no such command}" >&2
    exit 1
fi

# 3.12 first: the pinned versions are resolved on it.
for name in python3.12 python3.13 python3.14 python3 python; do
    try "$name"
done

try_uv() {
    try "$(uv python find --system --no-project ">=$minimum" 2>/dev/null)"
}
try_uv

home=${HOME:-$(eval echo "~$(id -un)")}
for python in "${PYENV_ROOT:-$home/.pyenv}"/versions/3.*/bin/python; do
    try "$python"
done

if command -v uv >/dev/null 2>&1; then
    echo "No Python $minimum or newer is installed; asking uv to install one" >&2
    uv python install --no-progress "$minimum" >&2 && try_uv
fi

{
    echo "No Python $minimum or newer was found in PATH, through uv, or among pyenv's versions."
    [ -z "$tried" ] || echo "Looked at:$tried"
    echo "Install one in any of these ways, then run the same command again:"
    echo "  uv python install $minimum"
    echo "  pyenv install $minimum"
    echo "  apt install python$minimum python$minimum-venv    (Debian, Ubuntu)"
    echo "  brew install python@$minimum                  (macOS)"
    echo "or name one that is elsewhere: make <target> PYTHON=/path/to/python$minimum"
} >&2
exit 1
