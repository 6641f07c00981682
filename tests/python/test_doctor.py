"""``strata doctor``: what it says of a healthy environment, and of environments that are broken on purpose.

Each environment is a virtual one of its own: links to the package under test, and the libraries of this Python only
where a test names them. A torch that must not be touched leaves a mark when it is imported.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import strata
import torch
from strata import doctor, torch_modules
from test_command_line import find_program

FIRST = next(iter(torch_modules.built()))  # the oldest torch that the package under test serves
PROBLEM = "PROBLEM      "


class Environment:
    """A virtual environment with the package, and with the libraries of this Python if ``beside``."""

    def __init__(self, folder, beside=False):
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        self.package = self.site / "strata"
        self.package.mkdir()
        for path in Path(strata.__file__).parent.iterdir():
            (self.package / path.name).symlink_to(path.resolve())
        if beside:
            (self.site / "beside.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    def add(self, name, version, text="", folder=None):
        """A package with metadata; an import of it leaves a mark."""
        home = (folder or self.site) / name
        home.mkdir(parents=True)
        (home / "__init__.py").write_text(f"open({str(self.site / 'mark')!r}, 'w').close()\n{text}\n")
        (home / "version.py").write_text(f"__version__ = '{version}'\n")
        metadata = home.parent / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def own_modules(self):
        """Makes the folder of extension modules one that a test may change; returns the first one's folder."""
        shutil.rmtree(self.package / "_torch") if not (self.package / "_torch").is_symlink() else (
            self.package / "_torch").unlink()  # fmt: skip
        folder = self.package / "_torch" / f"t{FIRST.replace('.', '_')}"
        folder.mkdir(parents=True)
        (folder / "built_for.txt").write_text(f"{FIRST}.0\n")
        return folder

    def variables(self, **more):
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("PYTHON", "STRATA_", "RANK", "WORLD_SIZE", "LD_"))}  # fmt: skip
        return {**kept, "STRATA_PYTHON": str(self.python), "PYTHONDONTWRITEBYTECODE": "1", **more}

    def run(self, command, code, **more):
        command = [str(part) for part in command]
        done = subprocess.run(command, env=self.variables(**more), capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def doctor(self, *arguments, code=1, machine=None, **more):
        """The report of the part in Python, as JSON."""
        command = [self.python, "-m", "strata.doctor", "--json", "--machine", json.dumps(machine or {"notes": []})]
        return json.loads(self.run([*command, *arguments], code, **more))

    def problem(self, *words, arguments=(), **more):
        """The one problem with these words."""
        problems = self.doctor(*arguments, **more)["problems"]
        (found,) = [problem for problem in problems if all(word in problem for word in words)] or [problems]
        assert isinstance(found, str), found
        return found


@pytest.fixture
def bare(tmp_path):
    return Environment(tmp_path / "bare")


@pytest.fixture
def whole(tmp_path):
    return Environment(tmp_path / "whole", beside=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """(an environment in which all is right, what `strata doctor` says of it)."""
    environment = Environment(tmp_path_factory.mktemp("healthy") / "whole", beside=True)
    code = int(bool(_this_machines_problems()))
    return environment, json.loads(environment.run([find_program(), "doctor", environment.site, "--json"], code))


def _this_machines_problems():
    space = os.statvfs("/dev/shm")
    return [] if space.f_bavail * space.f_frsize >= 512 << 20 else ["/dev/shm"]


@pytest.mark.xdist_group("doctor_of_the_healthy")
def test_a_healthy_environment(healthy):
    whole, told = healthy
    expected = _this_machines_problems()
    assert len(told["problems"]) == len(expected) and told["right"] == (not expected), told
    facts = told["facts"]
    assert set(facts) >= {
        "program", "system", "memory", "cores", "/dev/shm", "io_uring", "ranks", "CUDA", f"drive {whole.site}",
        "Python", "package", "torch", "module", "import torch", "libstdc++", "import strata", "transformers",
        "accelerate", "peft", "trl", "safetensors", "deepspeed"}  # fmt: skip
    assert facts["Python"]["path"] == str(whole.python) and facts["package"]["path"] == str(whole.package)
    assert facts["import torch"]["version"] == torch.__version__
    assert facts["torch"]["path"] == str(Path(torch.__file__).parent)
    assert facts["module"]["path"] == facts["import strata"]["module"]
    assert facts["libstdc++"]["newest"] > 20 and os.path.exists(facts["import torch"]["libstdc++"])
    assert all(fact["text"] for fact in facts.values())


def test_ranks_exchange_values_and_train_a_step(whole):
    facts = whole.doctor("--ranks", "2", code=0, CUDA_VISIBLE_DEVICES="")["facts"]
    assert facts["gloo"]["text"] == "2 ranks: a sum was right"
    assert facts["training step"]["text"] == "2 ranks: stage 3, over shm" and "NCCL" not in facts


def test_a_rank_that_stops_is_named(whole):
    """gloo is told to use a network interface that is not there."""
    broken = {"GLOO_SOCKET_IFNAME": "none0", "CUDA_VISIBLE_DEVICES": ""}
    problem = whole.problem("2 ranks cannot train together", arguments=("--ranks", "2"), **broken)
    assert "none0" in problem and "rank " in problem


def test_the_machine_is_shown_before_torch_is_looked_at(bare):
    lines = bare.run([find_program(), "doctor"], 1).splitlines()
    names = [line[:13].strip() for line in lines]
    assert names.index("program") < names.index("io_uring") < names.index("Python") < names.index("torch")
    assert [line for line in lines if line.startswith(f"{PROBLEM} Strata needs torch beside it")]
    problems = [line for line in lines if line.startswith(PROBLEM)]
    assert lines[-1] == f"problems      {len(problems)}; to ask for help, paste all of these lines"


def test_a_torch_that_is_not_there(bare):
    problem = bare.problem("Strata needs torch beside it")
    assert str(bare.python) in problem and f"pip install '{torch_modules.requirement()}'" in problem


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.9.1", f"torch 2.9.1 is installed; run pip install '{torch_modules.requirement()}'"),
        ("3.7.0+cu140", "torch 3.7.0+cu140 is installed; run pip install"),
        (f"{FIRST}.0.dev20260101", f"is no release, so it may differ from the torch {FIRST}."),
        (f"{FIRST}.0a0+1234abcd.nv26.01", f"STRATA_TORCH_MODULE={FIRST}"),
    ],
)
def test_a_torch_that_does_not_fit_is_named_untouched(bare, version, said):
    bare.add("torch", version)
    told = bare.doctor()
    assert [problem for problem in told["problems"] if said in problem], told["problems"]
    assert not (bare.site / "mark").exists() and "import torch" not in told["facts"]


def test_two_torches(bare, tmp_path):
    bare.add("torch", "2.9.1")
    bare.add("torch", "2.9.0", folder=tmp_path / "other")
    problem = bare.problem("finds torch 2 times", PYTHONPATH=str(tmp_path / "other"))
    assert problem.endswith(f"from PYTHONPATH: {tmp_path}/other/torch, {bare.site}/torch")


def test_two_stratas(bare, tmp_path):
    bare.add("strata", "0.0.1", folder=tmp_path / "other")
    problem = bare.problem("finds strata 2 times", PYTHONPATH=f"{bare.site}:{tmp_path / 'other'}")
    assert problem.endswith(f"from PYTHONPATH: {bare.package}, {tmp_path}/other/strata")


def test_a_program_of_another_version(bare):
    machine = {"facts": {"program": {"text": "strata 9.9.9, /usr/bin/strata"}}, "problems": ["of the machine"]}
    assert "STRATA_PYTHON" in bare.problem("the program is strata 9.9.9", machine=machine)
    assert bare.doctor(machine=machine)["problems"][0] == "of the machine"


def _library(path, text, *options):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to make a library with")
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", path, *options], input=text, text=True,
                   check=True)  # fmt: skip


def test_an_old_libstdcpp(whole, tmp_path):
    """torch's libraries, and the program, ask for versions of symbols that it does not have."""
    (tmp_path / "old").mkdir()
    (tmp_path / "versions").write_text("GLIBCXX_3.4 { global: old; };\n")
    _library(tmp_path / "old" / "libstdc++.so.6", 'extern "C" void old() {}', "-nostdlib", "-Wl,-soname,libstdc++.so.6",
             f"-Wl,--version-script={tmp_path / 'versions'}")  # fmt: skip
    problem = whole.problem("libstdc++.so.6 of this process is too old", LD_LIBRARY_PATH=str(tmp_path / "old"))
    assert "conda install 'libstdcxx-ng" in problem and "LD_LIBRARY_PATH" in problem


# A driver of CUDA 12.4 with two GPUs that reach each other and load no kernels.
DRIVER = r"""
#include <cstring>
typedef int (*Any)(...);
static int version(int* value) { return *value = 12040, 0; }
static int count(int* value) { return *value = 2, 0; }
static int get(int* device, int index) { return *device = index, 0; }
static int name(char* text, int size, int device) { return strncpy(text, "Toy GPU", size), 0; }
static int attribute(int* value, int which, int device) { return *value = which == 75 ? 9 : 0, 0; }
static int memory(size_t* bytes, int device) { return *bytes = 8ul << 30, 0; }
static int reaches(int* can, int from, int to) { return *can = 1, 0; }
static int load(void** module, const void* image) { return 222; }
static int words(int error, const char** text) { return *text = "the toolchain is newer", 0; }
static int nothing(...) { return 0; }
extern "C" int cuGetProcAddress_v2(const char* symbol, void** found, int, unsigned long, int*) {
  const struct { const char* name; void* function; } known[] = {
      {"cuDriverGetVersion", (void*)version}, {"cuDeviceGetCount", (void*)count}, {"cuDeviceGet", (void*)get},
      {"cuDeviceGetName", (void*)name}, {"cuDeviceGetAttribute", (void*)attribute}, {"cuDeviceTotalMem", (void*)memory},
      {"cuDeviceCanAccessPeer", (void*)reaches}, {"cuModuleLoadData", (void*)load},
      {"cuGetErrorName", (void*)words}, {"cuGetErrorString", (void*)words}};
  *found = (void*)nothing;
  for (const auto& entry : known)
    if (strcmp(symbol, entry.name) == 0) *found = entry.function;
  return 0;
}
"""


def test_gpus_whose_driver_is_too_old_for_the_kernels(bare, tmp_path):
    _library(tmp_path / "libcuda.so.1", DRIVER)
    told = json.loads(bare.run([find_program(), "doctor", "--json"], 1, LD_LIBRARY_PATH=str(tmp_path)))
    if told["facts"]["CUDA"]["kernels"] == 0:
        pytest.skip("this build has no CUDA device")
    assert told["facts"]["CUDA"]["driver"] == 12040
    assert told["facts"]["GPU 0"]["text"] == "Toy GPU, capability 9.0, 8.00 GiB, reaches GPUs [1]"
    assert told["facts"]["GPU 1"]["peers"] == [0] and "GPUs" not in told["facts"]
    (problem,) = [problem for problem in told["problems"] if "no kernel runs on GPU 1" in problem]
    assert "driver: 12.4" in problem and "the toolchain is newer" in problem


def test_a_driver_that_strata_cannot_use(bare, tmp_path):
    _library(tmp_path / "libcuda.so.1", 'extern "C" int cuInit(unsigned) { return 0; }')
    told = json.loads(bare.run([find_program(), "doctor", "--json"], 1, LD_LIBRARY_PATH=str(tmp_path)))
    if told["facts"]["CUDA"]["kernels"] == 0:
        pytest.skip("this build has no CUDA device")
    assert told["facts"]["GPUs"]["text"] == "none: the CUDA driver is older than 12.0; update it"


def test_a_program_that_does_not_run(bare):
    program = bare.python.with_name("strata")
    program.write_text("#!/bin/sh\necho 'strata: GLIBCXX_3.4.30 not found' >&2\nexit 1\n")
    program.chmod(0o755)
    told = json.loads(bare.run([bare.python, "-m", "strata.doctor", "--json"], 1))
    assert told["problems"][0].endswith(": strata: GLIBCXX_3.4.30 not found") and str(program) in told["problems"][0]


@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_shared_memory_that_is_tiny_or_not_writable(bare, options):
    wrong = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*alone, wrong], capture_output=True).returncode:
        pytest.skip("this system gives no mount namespace in which /dev/shm can be changed")
    told = json.loads(bare.run([*alone, f"{wrong} && exec '{find_program()}' doctor --json"], 1))
    (problem,) = [problem for problem in told["problems"] if "/dev/shm" in problem]
    assert "--ipc=host" in problem


def test_a_module_of_another_python(bare):
    folder = bare.own_modules()
    bare.add("torch", f"{FIRST}.0")
    (folder / "_C.cpython-39-x86_64-linux-gnu.so").write_text("")
    problem = bare.problem("was built for Python 3.9, and this is Python 3.")
    assert f"{bare.python} -m pip install strata-train" in problem


def test_symbols_that_torch_lacks_are_named(whole):
    folder = whole.own_modules()
    module = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    _library(module, 'void first_missing(int); void second_missing(); extern "C" void* PyInit__C() {'
                     " first_missing(3); second_missing(); return nullptr; }", "-Wl,-z,now")  # fmt: skip
    version = torch.__version__.split("+")[0]
    choice = {"STRATA_TORCH_MODULE": FIRST} if version.rpartition(".")[0] != FIRST else {}
    told = whole.doctor(**choice)
    first, second = [problem for problem in told["problems"] if "missing" in problem]
    assert "undefined symbol" in first and f"lack 2 symbols that {module} needs" in second
    names = ("first_missing(int), second_missing()", "_Z13first_missingi, _Z14second_missingv")  # without c++filt
    assert second.endswith(names)


def test_an_engine_that_ends_the_process(whole):
    module = whole.own_modules() / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    _library(module, 'extern "C" void abort(); extern "C" void* PyInit__C() { abort(); return nullptr; }')
    told = whole.doctor(STRATA_TORCH_MODULE=FIRST)
    assert any("ended by SIGABRT" in problem for problem in told["problems"]), told["problems"]


def test_libraries_outside_the_tried_versions(bare):
    bare.add("transformers", "4.1.0")
    bare.add("peft", "9.0.0")
    told = bare.doctor()
    (problem,) = [problem for problem in told["problems"] if "transformers" in problem]
    assert "not tried with transformers 4.1.0" in problem and f"{bare.python} -m pip install 'transformers>=" in problem
    assert "not tried with peft 9.0.0" in told["notes"][0] and "'peft>=0.18,<0.22'" in told["notes"][0]
    assert told["facts"]["transformers"]["version"] == "4.1.0" and told["facts"]["trl"]["version"] is None


def test_versions_are_compared_with_what_pip_takes():
    versions = ">=4.55,<5.25,!=5.0.*,!=5.1.*"
    meets = [version for version in ("4.9.1", "4.55.0", "5.0.3", "5.1.0", "5.2.0.dev0", "5.24.9", "5.25.0", "10.1")
             if doctor._meets(versions, version)]  # fmt: skip
    assert meets == ["4.55.0", "5.2.0.dev0", "5.24.9"]


@pytest.mark.xdist_group("doctor_of_the_healthy")
def test_the_libraries_of_the_tests_are_among_the_tried_versions(healthy):
    _, told = healthy
    assert [note for note in told["notes"] if "was not tried" in note] == []


def test_a_read_only_package(bare):
    """Strata runs from it, and pip cannot change it."""
    bare.package.chmod(0o555)
    bound = []
    if os.access(bare.package, os.W_OK):  # as root, unless it gives up the right to write everywhere
        bound = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
        if shutil.which("setpriv") is None or subprocess.run([*bound, "true"]).returncode:
            pytest.skip("this system lets no process give up the right to write everywhere")
    told = json.loads(bare.run([*bound, bare.python, "-m", "strata.doctor", "--json", "--machine", '{"notes":[]}'], 1))
    assert f"{bare.package} is read-only: Strata runs" in told["notes"][0] and "-m venv" in told["notes"][0]


def test_ds_report_shows_the_table_in_deepspeeds_place(bare):
    bare.add("deepspeed", "0.19.8")
    told = bare.doctor(STRATA_COMPAT="deepspeed")
    assert any("STRATA_COMPAT has no effect" in problem for problem in told["problems"])
    assert told["facts"]["deepspeed"]["text"].startswith("0.19.8; 'import deepspeed' gives DeepSpeed")
    shutil.copy(bare.package / "compat" / "strata-compat.pth", bare.site)
    bare.python.with_name("strata").symlink_to(find_program())
    report = "from deepspeed.env_report import cli_main; cli_main()"
    shown = bare.run([bare.python, "-c", report], 0, STRATA_COMPAT="deepspeed")  # as DeepSpeed's
    assert "\nio_uring " in shown and f"\n{PROBLEM} Strata needs" in shown
    assert f"+strata.{strata.__version__}; 'import deepspeed' gives Strata" in shown
    assert not (bare.site / "mark").exists()


def test_a_wrong_command_line(bare):
    done = subprocess.run([find_program(), "doctor", "--ranks", "none"], capture_output=True, text=True)
    assert done.returncode == 2 and "--ranks" in done.stderr
    help = subprocess.run([find_program(), "doctor", "--help"], capture_output=True, text=True)
    assert help.returncode == 0 and "--config" in help.stdout
