"""Takes the headers and libraries that Strata's modules are compiled with out of torch's wheels; installs nothing.

    tools/torch_sdk.py FOLDER VERSION...

FOLDER/VERSION gets torch's version.py, include/ and four libraries of lib/, 0.6 GB for each version. A module is
compiled and linked with these. They are the same for every Python. A version whose folder exists is not downloaded.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PARTS = ("torch/version.py", "torch/include/", *(f"torch/lib/lib{name}.so" for name in
                                                 ("c10", "torch", "torch_cpu", "torch_python")))  # fmt: skip
PYTHON = "3.12"  # each of these versions has a wheel for it


def extract(version, target):
    """Downloads the wheel of torch ``version``, and puts its parts into ``target``, all or none."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps",
                        "--no-cache-dir", "--only-binary", ":all:", "--python-version", PYTHON, "-d", scratch,
                        f"torch=={version}"], check=True)  # fmt: skip
        (wheel,) = Path(scratch).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(PARTS)])
        shutil.move(Path(scratch) / "torch", target)


def main(folder, versions):
    folder.mkdir(parents=True, exist_ok=True)
    for version in versions:
        if not (folder / version).exists():
            print(f"Taking the headers out of torch {version}", flush=True)
            extract(version, folder / version)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
