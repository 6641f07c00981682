#!/bin/sh
# Creates the virtual environment VENV with PYTHON if there is none, and installs the pinned requirements, or those of
# the tests. Packages in the right version are not touched.
#   tools/python_environment.sh PYTHON VENV [tests]
set -eu
python=$1
venv=$2

if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"
if [ "${3:-}" != tests ]; then
  $pip install -q -r requirements.txt
  exit
fi
# DeepSpeed is built from source against the torch that was just installed, without its own operators.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $pip install -q --no-build-isolation -r requirements-test.txt
