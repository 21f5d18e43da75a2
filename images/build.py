"""Build the images: ``python -m images.build [NAMES]``, with buildah or docker.

What a build needs lies in one folder, its context: wheels, scripts, sources. Nothing is downloaded inside a build but
the base, so that an image neither needs nor learns the address of a package index.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from images import base, versions, wheels
from images.tools import TOOLS, Tool
from images.versions import ROOT, ImageError, say
from vllm_spans import embedded
from vllm_spans.embedded.fetch import FetchError, fetch_gguf
from vllm_spans.patches.stock import patch_set_hash

IMAGES = ROOT / "images"
PREFIX = "localhost"
LOCAL, STAND_IN = "local", "stand-in"
SBOM = "/usr/share/vllm-spans/sbom.cdx.json"
IGNORED = shutil.ignore_patterns("__pycache__")


@dataclass(frozen=True)
class Image:
    """What goes into an image.

    Attributes:
        name: Of its repository and its folder.
        extras: Of pyproject.toml, whose packages are installed.
        dependencies: Whether the packages are installed that vllm_spans needs without an extra.
        further: Packages beside, by their names in the lock file.
        without: Packages left out, though another asks for them.
        sources: Folders of the checkout that are copied in.
        model: Whether it carries the embedded model.
        engine: Whether it serves: it has a vLLM and its patches.
    """

    name: str
    extras: tuple[str, ...] = ()
    dependencies: bool = True
    further: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    model: bool = False
    engine: bool = False


ALL = {
    image.name: image
    for image in (
        # OpenCV is for pictures and films, which vLLM imports it for; engines with spans take text.
        Image(
            "vllm-spans-cpu",
            extras=("cpu",),
            without=("opencv-python-headless",),
            model=True,
            engine=True,
        ),
        Image("vllm-spans", engine=True),
        # gguf is for the embedded model, which these do not serve; it would bring numpy.
        Image("spans-exporter", extras=("exporter",), dependencies=False, further=("httpx",)),
        Image(
            "spans-loadtest",
            extras=("loadtest",),
            dependencies=False,
            further=("httpx", "prometheus-client"),
            sources=("loadtests", "demo"),
        ),
    )
}


class Build:
    """Builds images from one state of the checkout.

    Args:
        tool: What builds.
        debian: Image that all but the CUDA image stand on; each file's own default when left out.
        engine_base: Image with vLLM that the CUDA image stands on; the file's own default when left out.
    """

    def __init__(
        self, tool: Tool, debian: str | None = None, engine_base: str | None = None
    ) -> None:
        self._tool = tool
        self._debian = debian
        self.engine_base = engine_base
        self._own = [wheels.own()]

    def make(self, image: Image, tag: str, target: str | None = None) -> None:
        """Build one image and put its bill of materials beside the wheels.

        Args:
            image: Which.
            tag: Its name and tag.
            target: Stage to stop at.
        """
        begin = time.monotonic()
        say(f"{tag}: building with {self._tool.name}")
        context, arguments = self._context(image)
        stands_on = self.engine_base if image.name == "vllm-spans" else self._debian
        if stands_on is not None:
            arguments["BASE"] = stands_on
        file = IMAGES / image.name / "Containerfile"
        self._tool.build(context, file, tag, arguments, target)
        if target is None:
            bill = wheels.folder() / "sbom" / f"{image.name}-{versions.project()}.cdx.json"
            bill.parent.mkdir(exist_ok=True)
            self._tool.copy_out(tag, SBOM, bill)
        say(f"{tag}: done after {time.monotonic() - begin:.0f} s")

    def _context(self, image: Image) -> tuple[Path, dict[str, str]]:
        """Lay out the folder that the image is built from; its hashes go into the build arguments.

        buildah does not look into mounted folders when it decides whether a step is in its cache.
        """
        context = wheels.folder() / "contexts" / image.name
        shutil.rmtree(context, ignore_errors=True)
        roots = versions.requirements(*image.extras, dependencies=image.dependencies)
        pins = versions.closure([*roots, *image.further], image.without)
        text = "".join(f"{pin}\n" for pin in pins)
        self._link(wheels.fetch(pins).values(), context / "wheels")
        (context / "wheels" / "requirements.txt").write_text(text, encoding="utf-8")
        own = list(self._own)
        if "cpu" in image.extras:
            own.append(wheels.command_metadata())
        self._link(own, context / "own")
        shutil.copytree(IMAGES / "inside", context / "inside", ignore=IGNORED)
        arguments = {
            "REQUIREMENTS_SHA256": hashlib.sha256(text.encode()).hexdigest(),
            "OWN_SHA256": _hash_of(context / "own", context / "inside"),
            "VERSION": versions.project(),
            "REVISION": _revision(),
        }
        if image.engine:
            arguments |= {"VLLM_VERSION": versions.vllm(), "PATCH_SET": patch_set_hash()}
        if image.model:
            arguments["MODEL_SHA256"] = self._model(context / "model")
        for name in image.sources:
            shutil.copytree(ROOT / name, context / "sources" / name, ignore=IGNORED)
        return context, arguments

    def _model(self, folder: Path) -> str:
        """What the model is made of: the pinned file, and the code that converts it."""
        package = folder / "vllm_spans"
        shutil.copytree(ROOT / "vllm_spans" / "embedded", package / "embedded", ignore=IGNORED)
        shutil.copy2(ROOT / "vllm_spans" / "__init__.py", package)
        try:
            weights = fetch_gguf(embedded.cache_dir() / "downloads", say)
        except FetchError as error:
            raise ImageError(str(error)) from error
        self._link([weights], folder / "downloads")
        return _hash_of(folder)

    def _link(self, files: Iterable[Path], folder: Path) -> None:
        """Put files into a folder without copying them where the disk allows that."""
        folder.mkdir(parents=True)
        for path in files:
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copy2(path, folder / path.name)


def _hash_of(*folders: Path) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(str(path.relative_to(folder)).encode() + b"\0")
                with path.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _revision() -> str:
    """The commit that is checked out, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match", "no-tag"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m images.build", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ALL)} (default: all)")
    parser.add_argument("--tool", choices=TOOLS, help="default: the first that is installed")
    parser.add_argument(
        "--base",
        metavar="IMAGE",
        help=f"a Debian with Python 3.11 (default: the official Python image; {LOCAL}: the one that "
        "`python -m images.base` makes)",
    )
    parser.add_argument(
        "--engine-base",
        metavar="IMAGE",
        help=f"for vllm-spans: an image with vLLM for CUDA (default: upstream's; {STAND_IN}: the CPU build, to "
        "check the layer where upstream's cannot be had)",
    )
    parser.add_argument("--push", metavar="HOST", help="push to this registry too")
    parser.add_argument("--tag", default=versions.project(), help="default: the project's version")
    return parser


def _build(tool: Tool, names: Sequence[str], options: argparse.Namespace) -> None:
    local = base.ensure(tool) if options.base == LOCAL else options.base
    build = Build(tool, local, options.engine_base)
    for name in names:
        tag = f"{PREFIX}/{name}:{options.tag}"
        standing_in = name == "vllm-spans" and options.engine_base == STAND_IN
        if standing_in:
            tag += f"-{STAND_IN}"
            build.engine_base = f"{PREFIX}/vllm-spans-{STAND_IN}:{options.tag}"
            build.make(ALL["vllm-spans-cpu"], build.engine_base, STAND_IN)
        build.make(ALL[name], tag)
        if options.push and not standing_in:
            target = f"{options.push}/{name}:{options.tag}"
            say(f"pushing {target}")
            tool.push(tag, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and push; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.names or list(ALL)
    if unknown := set(names) - set(ALL):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    try:
        tool = Tool(options.tool)
        with wheels.locked():
            _build(tool, names, options)
    except ImageError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
