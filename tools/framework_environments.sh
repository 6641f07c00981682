#!/bin/sh
# Makes FOLDER/lightning, FOLDER/llamafactory, FOLDER/axolotl and FOLDER/openrlhf, virtual environments on top of VENV.
# Each has a framework that trains with DeepSpeed, at the version named here, and those of its pinned packages that
# affect training. torch and DeepSpeed are VENV's. Nothing is compiled: packages without a wheel for this machine, or
# with wheels for GPUs alone (flash-attn, vllm), are left out; the frameworks are imported without them.
#   tools/framework_environments.sh VENV FOLDER [NAME...]
set -eu
venv=$1
folder=$2
shift 2
names=${*:-lightning llamafactory axolotl openrlhf}
here=$(dirname "$0")

own_packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
all_packages='import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")'

# The framework and its pins, installed without pip's dependencies.
pinned() {
  case $1 in
    lightning) echo lightning==2.6.6 pytorch-lightning==2.6.6 torchmetrics==1.9.0 lightning-utilities ;;
    llamafactory) echo llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 accelerate==1.11.0 peft==0.18.1 \
      trl==0.24.0 datasets==4.0.0 torchaudio==2.11.0 omegaconf antlr4-python3-runtime==4.9.3 ;;
    axolotl) echo axolotl==0.19.0 transformers==5.16.1 tokenizers==0.23.1 accelerate==1.13.0 peft==0.20.0 trl==1.9.0 \
      datasets==4.8.4 huggingface_hub==1.17.0 hf_xet==1.4.3 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 ;;
    openrlhf) echo openrlhf==0.11.2 transformers==5.15.0 tokenizers==0.22.2 torchdata==0.11.0 ;;
    *) echo "no framework is called $1" >&2; return 1 ;;
  esac
}

# Their other imports, in the versions that pip chooses.
others() {
  case $1 in
    llamafactory) echo requests ;;
    axolotl) echo requests posthog numba bitsandbytes==0.50.2 fastcore fire addict colorama pillow evaluate wandb ;;
    openrlhf) echo requests pylatexenc ;;
  esac
}

for name in $names; do
  target=$folder/$name
  wanted="$(pinned "$name") $(others "$name")"
  if [ "$(cat "$target/made-of" 2>/dev/null)" = "$wanted" ]; then
    continue
  fi
  [ -x "$target/bin/python" ] || "$venv/bin/python" -m venv "$target"
  site=$("$target/bin/python" -c "$own_packages")
  "$venv/bin/python" -I -c "$all_packages" > "$site/pinned.pth"
  cp "$here/../python/strata/compat/strata-compat.pth" "$site/"
  pip="$target/bin/python -m pip --disable-pip-version-check install -q --prefer-binary"
  # Names and versions, split into words on purpose. The packages without wheels are pure Python.
  $pip --no-deps --only-binary :all: \
    --no-binary axolotl-contribs-lgpl,axolotl-contribs-mit,antlr4-python3-runtime,fire $(pinned "$name")
  if [ -n "$(others "$name")" ]; then
    echo "torch==$("$venv/bin/python" -c 'import torch; print(torch.__version__.partition("+")[0])')" > "$target/kept"
    $pip --only-binary :all: --no-binary fire -c "$target/kept" $(others "$name")
  fi
  printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$(cd "$target/bin" && pwd)/python" > "$target/bin/torchrun"
  chmod +x "$target/bin/torchrun"
  echo "$wanted" > "$target/made-of"
done
