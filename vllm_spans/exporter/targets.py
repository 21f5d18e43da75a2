"""What is scraped: a list of addresses, or whatever a source finds that changes while the exporter runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

METRICS_PATH = "/metrics"


class TargetError(ValueError):
    """A target cannot be scraped; the text says what is wrong with it."""


@dataclass(frozen=True)
class Target:
    """A pod, or a server at an address.

    Attributes:
        key: What tells it from all others, for ever: a pod's uid, or the address.
        name: For people: ``namespace/name`` of a pod, ``host:port`` of a server.
        url: Its page of metrics; ``None`` while it has no address.
        ready: Whether Kubernetes calls it ready.
        incarnation: Whatever changes when its container is restarted.
        started: When the container started, in seconds since the epoch, where that is known.
    """

    key: str
    name: str
    url: str | None
    ready: bool = True
    incarnation: str = ""
    started: float | None = None


class Source(Protocol):
    """Finds targets."""

    def start(self) -> None:
        """Begin to look for targets."""

    def stop(self) -> None:
        """Stop looking."""

    def targets(self) -> list[Target]:
        """The targets of this moment. Never blocks: what was known last is given while nothing newer can be had."""

    def problem(self) -> str | None:
        """Why no list of targets has been had yet; ``None`` when one has."""


def static_target(text: str) -> Target:
    """Target of an address.

    Args:
        text: ``http://host:port``, with another path than ``/metrics`` if need be.

    Raises:
        TargetError: It is no such address.
    """
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise TargetError(f"{text!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise TargetError(f"{text!r} is not an address: write http://HOST:PORT")
    path = parts.path if parts.path.strip("/") else METRICS_PATH
    url = f"{parts.scheme}://{parts.netloc}{path}"
    return Target(key=url, name=parts.netloc.rpartition("@")[2], url=url)


class StaticSource:
    """Addresses given on the command line, and those in a file, which is read again when it changes.

    Args:
        addresses: See ``static_target``.
        file: One address a line; empty lines and lines that begin with ``#`` are passed over.

    Raises:
        TargetError: An address is wrong, or the file cannot be read.
    """

    def __init__(self, addresses: Sequence[str], file: Path | None = None) -> None:
        self._given = [static_target(address) for address in addresses]
        self._file = file
        self._listed: list[Target] = []
        self._changed: tuple[int, int] | None = None
        self._read()

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def targets(self) -> list[Target]:
        """The addresses; those of a file that cannot be read any more stay."""
        try:
            self._read()
        except TargetError as error:
            logger.warning("the targets stay as they were: %s", error)
        return list({target.key: target for target in (*self._given, *self._listed)}.values())

    def problem(self) -> str | None:
        """None: the list is there from the start on."""
        return None

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            status = self._file.stat()
            changed = (status.st_mtime_ns, status.st_size)
            if changed == self._changed:
                return
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TargetError(f"{self._file} cannot be read: {error}") from error
        found = [line.strip() for line in lines]
        self._changed = changed
        self._listed = [static_target(line) for line in found if line and line[0] != "#"]
