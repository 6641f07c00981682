#!/bin/sh
# Creates the virtual environment VENV with PYTHON if there is none, and installs the pinned requirements, or those of
# the tests or of the site. Packages in the right version are not touched. UV is the uv of another environment. The
# variable TORCH names another version of torch.
#   tools/python_environment.sh PYTHON VENV [tests|site [UV]]
set -eu
python=$1
venv=$2
uv=${4:-$venv/bin/uv}

if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv ${4:+--without-pip} "$venv"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"

# uv unpacks in a third of pip's time. It reads none of pip's settings but those passed here; pip is tried where it fails.
install() {
  if [ -x "$uv" ] || $pip install -q -r tools/requirements-uv.txt; then
    UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}" UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" \
      "$uv" pip install -q --python "$venv/bin/python" "$@" && return
  fi
  $pip install -q "$@"
}

case "${3:-}" in
  "")
    wanted=requirements.txt
    if [ -n "${TORCH:-}" ]; then
      wanted=$venv/requirements.txt
      sed "s/^torch==.*/torch==$TORCH/" requirements.txt > "$wanted"
    fi
    install -r "$wanted"
    exit
    ;;
  site) install -r tools/requirements-site.txt; exit ;;
esac
# DeepSpeed is built from source against the torch that was just installed, without its own operators.
export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu
install --no-build-isolation -r requirements-test.txt
