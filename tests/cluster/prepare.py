"""Put what the cluster tests need onto this machine: ``python -m tests.cluster.prepare``.

etcd and the Go compiler are Debian packages. No package carries an API server, but Debian's source package of
Kubernetes is the complete tree, so its programs are built from it, once, into a cache folder outside the checkout:
``${XDG_CACHE_HOME:-~/.cache}/vllm_spans/kubernetes/VERSION/bin``. All of them take seven minutes of processor time.
Running it again does nothing.

It needs root to install the packages, and nothing but the standard library.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_SUITE = "bookworm"
SOURCE_VERSION = "1.20.5+really1.20.2-1.1+deb12u1"
VERSION = "1.20.2"
PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
)
PACKAGES = {"etcd": "etcd-server", "openssl": "openssl"}
BUILD_PACKAGES = {"go": "golang-go"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGE_PATH = "k8s.io/kubernetes"


class PrepareError(RuntimeError):
    """Something that the tests need cannot be had; the text says what to do."""


def cache_dir() -> Path:
    """Folder of everything that is built from one version of the source."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vllm_spans" / "kubernetes" / VERSION


def program(name: str) -> Path:
    """Path of a program of Kubernetes.

    Raises:
        PrepareError: It has not been built.
    """
    path = cache_dir() / "bin" / name
    if not path.exists():
        raise PrepareError(f"{path} is missing: run `make test-cluster`, or {_command(name)}")
    return path


def prepare(programs: Sequence[str]) -> None:
    """Install and build what is missing.

    Args:
        programs: Of ``PROGRAMS``, those wanted.

    Raises:
        PrepareError: A package cannot be installed, or the build fails.
    """
    install(PACKAGES)
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once would build the same twice
        missing = [name for name in programs if not (cache_dir() / "bin" / name).exists()]
        if missing:
            install(BUILD_PACKAGES)
            _build(missing)


def install(packages: dict[str, str]) -> None:
    """Install Debian packages.

    Args:
        packages: Command, or path of a file -> packages that bring it; what is there needs none.

    Raises:
        PrepareError: One is missing and cannot be installed.
    """
    missing = [names for command, names in packages.items() if shutil.which(command) is None]
    wanted = " ".join(missing).split()
    if not wanted:
        return
    if os.geteuid():
        raise PrepareError(f"as root: apt-get install {' '.join(wanted)}")
    _say(f"installing {' '.join(wanted)}")
    # In run level 1 no package starts its service: the tests start what they need, as they need it.
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    _run("apt-get", "update", "-qq", environ=environ)
    _run(
        "apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted, environ=environ
    )  # fmt: skip


def _build(programs: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache_dir()) as folder:
        work = Path(folder)
        tree = work / "go" / "src" / PACKAGE_PATH
        _unpack(_download(work / "apt"), tree)
        environ = {
            **os.environ,
            "GOPATH": str(work / "go"),
            "GOCACHE": str(work / "gocache"),
            "GO111MODULE": "off",
            "GOFLAGS": "",
            "GOTOOLCHAIN": "local",
            "CGO_ENABLED": "0",
        }
        _generate_openapi(work, tree, environ)
        prefix = f"-X {PACKAGE_PATH}/vendor/k8s.io/component-base/version."
        major, minor, _ = VERSION.split(".")
        flags = (
            f"-s -w {prefix}gitVersion=v{VERSION} {prefix}gitMajor={major} {prefix}gitMinor={minor}"
        )
        for name in programs:
            _say(f"building {name} {VERSION}: minutes, once")
            command = ["go", "build", "-tags", "providerless dockerless", "-ldflags", flags]
            command += ["-o", str(work / name), f"./cmd/{name}"]
            _run(*command, cwd=tree, environ=environ)
            (cache_dir() / "bin").mkdir(exist_ok=True)
            (work / name).rename(cache_dir() / "bin" / name)


def _download(folder: Path) -> Path:
    """Debian's archive of the source, through a configuration of its own: nothing under /etc/apt changes."""
    for name in ("lists/partial", "archives/partial", "cache"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(
        f"deb-src [signed-by={KEYRING}] {_mirror()} {SOURCE_SUITE} main\n"
    )
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
        'Dir::Etc::sourceparts "-";\n'
        f'Dir::State::lists "{folder}/lists";\n'
        f'Dir::Cache "{folder}/cache";\n'
        f'Dir::Cache::archives "{folder}/archives";\n'
        'APT::Sandbox::User "root";\n'
    )
    environ = {**os.environ, "APT_CONFIG": str(folder / "apt.conf")}
    _say(f"downloading the source of Kubernetes {VERSION}")
    _run("apt-get", "update", "-qq", environ=environ)
    source = f"kubernetes={SOURCE_VERSION}"
    _run("apt-get", "source", "-qq", "--download-only", source, cwd=folder, environ=environ)
    found = list(folder.glob("kubernetes_*.orig.tar.*"))
    if len(found) != 1:
        raise PrepareError(f"the source package {source} brought {len(found)} archives, not one")
    return found[0]


def _mirror() -> str:
    """Address that this machine's own apt sources give for Debian's main archive."""
    if not os.geteuid():
        _run("apt-get", "update", "-qq")  # what a source is of is known from its lists only
    wanted = ["--format", "$(ORIGIN)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)"]
    found = subprocess.run(
        ["apt-get", "indextargets", *wanted], capture_output=True, text=True, check=True
    )
    for line in found.stdout.splitlines():
        origin, codename, component, address = line.split("|")
        # Suites of updates have a dash in their name; the source is in the release itself.
        if origin == "Debian" and component == "main" and "-" not in codename:
            return address
    raise PrepareError("no apt source of this machine is Debian's main archive")


def _unpack(archive: Path, tree: Path) -> None:
    unpacked = tree.with_name("unpacked")
    unpacked.mkdir(parents=True)
    _run("tar", "-xf", str(archive), "-C", str(unpacked))
    (top,) = unpacked.iterdir()
    top.rename(tree)


def _generate_openapi(work: Path, tree: Path, environ: dict[str, str]) -> None:
    """Generate the one source file that the archive lacks: the API's own description."""
    _say("generating the API's description")
    generator = work / "openapi-gen"
    package = "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    _run("go", "build", "-o", str(generator), package, cwd=tree, environ=environ)
    command = [str(generator), "--logtostderr", "-i", ",".join(_described(tree))]
    command += ["-p", f"{PACKAGE_PATH}/pkg/generated/openapi", "-O", "zz_generated.openapi"]
    command += ["-h", "hack/boilerplate/boilerplate.generatego.txt", "-r", str(work / "report")]
    _run(*command, cwd=tree, environ=environ)


def _described(tree: Path) -> list[str]:
    """Go packages that ask to be part of the API's description."""
    passed_over = ("code-generator", "sample-apiserver", "kube-openapi")
    packages = set()
    for top in ("pkg", "cmd", "staging/src/k8s.io"):
        for path in (tree / top).rglob("*.go"):
            relative = path.relative_to(tree)
            if path.name.startswith("zz_generated") or path.name.endswith("_test.go"):
                continue
            if set(relative.parts) & set(passed_over):
                continue
            if "+k8s:openapi-gen=" in path.read_text(encoding="utf-8"):
                folder = str(relative.parent).replace("staging/src/k8s.io", "vendor/k8s.io", 1)
                packages.add(f"{PACKAGE_PATH}/{folder}")
    return sorted(packages)


def _run(*command: str, cwd: Path | None = None, environ: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise PrepareError(f"{' '.join(command)[:200]} failed:\n{done.stdout[-4000:]}")


def _say(line: str) -> None:
    print(f"[cluster] {line}", flush=True)


def _command(name: str) -> str:
    return f"`{sys.executable} -m tests.cluster.prepare {name}`"


def main() -> int:
    """Prepare the programs named on the command line, all unless some are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    programs = parser.parse_args().programs or PROGRAMS
    unknown = set(programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    try:
        prepare(programs)
    except PrepareError as error:
        print(f"[cluster] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
