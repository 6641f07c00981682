#!/bin/sh
# Makes TARGET, a virtual environment that stands on VENV: the newest transformers, accelerate, peft
# and trl that pip finds, and all else as VENV has it.
#   tools/newest_environment.sh VENV TARGET
set -eu
venv=$1
target=$2

packages_of() {
  "$1/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
}

if [ ! -x "$target/bin/python" ]; then
  "$venv/bin/python" -m venv "$target"
fi
packages_of "$venv" > "$(packages_of "$target")/pinned.pth"
pip="$target/bin/python -m pip --disable-pip-version-check"
$pip install -q --upgrade transformers accelerate peft trl
$pip list 2>&1 | grep -E '^(transformers|accelerate|peft|trl|torch) '
