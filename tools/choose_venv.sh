#!/bin/sh
# Prints the virtual environment to use: .venv, unless it was made with another Python version than
# the one that the caller names; then .venv-<version>, so that both stay usable side by side.
#   tools/choose_venv.sh [PYTHON]
python=${1:-}
if [ -z "$python" ] || [ ! -x .venv/bin/python ]; then
  echo .venv
  exit 0
fi
version='import sys; print("%d.%d" % sys.version_info[:2])'
wanted=$("$python" -c "$version" 2>/dev/null)
if [ -z "$wanted" ] || [ "$wanted" = "$(.venv/bin/python -c "$version")" ]; then
  echo .venv
else
  echo ".venv-$wanted"
fi
