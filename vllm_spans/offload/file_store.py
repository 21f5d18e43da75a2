"""FileStore: blocks as files in a folder that several processes may share.

A file is written under a temporary name and renamed, so a reader sees all of it or nothing. Nothing here trusts what
it reads: a file is used only if its header and its checksum match.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_spans.offload.file_format import (
    FORMAT_VERSION,
    HEADER_SIZE,
    BadFileError,
    Buffer,
    FileError,
    Identity,
    check_header,
    check_payload,
    decode_header,
    encode_header,
)

SUFFIX = ".kv"
TEMPORARY = ".tmp-"
"""How the name of a file begins that is still being written."""
ABOUT = "about.json"
"""What a model's folder is for, in plain text, for people and for ``vllm-spans cache``."""

_TOUCH_AFTER = 60.0


class FileStore:
    """Files of one model's blocks.

    Args:
        root: Folder of the file tier, shared by all models.
        name: Name of the model, for people.
        identity: What the files must match.
    """

    def __init__(self, root: Path, name: str, identity: Identity) -> None:
        self._identity = identity
        self._name = name
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name.strip("/"))
        self.folder = versioned(root) / f"{safe[-64:]}-{identity.fingerprint}"
        # Beside the process id, which replicas in containers have in common.
        self._writer = secrets.token_hex(8)
        self._numbers = itertools.count()

    def path(self, key: bytes) -> Path:
        """Where the block of a key is, or would be."""
        name = key.hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def contains(self, key: bytes) -> bool:
        """Whether there is a file for a key; what is in it shows when it is read.

        Raises:
            FileError: ``permission`` or ``io``.
        """
        try:
            os.stat(self.path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _as_file_error(error) from error
        return True

    def write(self, key: bytes, payload: Buffer) -> int:
        """Write a block unless there is a file for its key.

        Args:
            key: Key of the block.
            payload: ``identity.payload_size`` bytes.

        Returns:
            Bytes written.

        Raises:
            FileError: ``no_space``, ``permission`` or ``io``; no part of the file is left behind.
        """
        path = self.path(key)
        try:
            if path.exists():
                return 0
            header = encode_header(self._identity, key, payload)
            try:
                self._write(path, header, payload)
            except FileNotFoundError:
                # Also when the folder, empty for a moment, was pruned away.
                self._make_folder(path.parent)
                self._write(path, header, payload)
        except OSError as error:
            raise _as_file_error(error) from error
        return len(header) + len(payload)

    def read_into(self, key: bytes, buffer: memoryview) -> None:
        """Read a block.

        Args:
            key: Key of the block.
            buffer: ``identity.payload_size`` writable bytes. Their content is undefined after an error.

        Raises:
            BadFileError: The file is not what it should be; it has been deleted.
            FileError: ``vanished``, ``permission`` or ``io``.
        """
        path = self.path(key)
        try:
            try:
                self._read(path, key, buffer)
            except BadFileError:
                # Left in place it would be found, read and refused for ever, and never be written again.
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        except OSError as error:
            raise _as_file_error(error) from error

    def _read(self, path: Path, key: bytes, buffer: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            descriptor = file.fileno()
            header = decode_header(_read_up_to(descriptor, HEADER_SIZE))
            check_header(header, self._identity, key)
            status = os.fstat(descriptor)
            if status.st_size != HEADER_SIZE + len(buffer):
                raise BadFileError(
                    "truncated", f"{status.st_size} bytes, not {HEADER_SIZE + len(buffer)}"
                )
            count = _read_into(descriptor, buffer)
            check_payload(header, buffer[:count])
            if time.time() - status.st_mtime > _TOUCH_AFTER:
                with contextlib.suppress(OSError):
                    os.utime(path)

    def _write(self, path: Path, *parts: Buffer) -> None:
        writer = f"{os.getpid()}-{self._writer}-{next(self._numbers)}"
        temporary = path.with_name(f"{TEMPORARY}{writer}-{path.name}")
        try:
            with open(temporary, "xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / ABOUT
        if about.exists():
            return
        text = json.dumps(
            {
                "model": self._name,
                "dtype": self._identity.dtype,
                "payload_size": self._identity.payload_size,
                "identity": dict(self._identity.model),
                "geometry": dict(self._identity.geometry),
            },
            indent=2,
            sort_keys=True,
        )
        self._write(about, text.encode())


def versioned(root: Path) -> Path:
    """Folder of this format version under the folder of the file tier."""
    return root / f"v{FORMAT_VERSION}"


def verify(path: Path) -> None:
    """Read a file of any model and check that it is whole.

    Raises:
        FileError: Its reason.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = decode_header(_read_up_to(file.fileno(), HEADER_SIZE))
            size = os.fstat(file.fileno()).st_size - HEADER_SIZE
            if size != header.payload_size:
                raise BadFileError("truncated", f"{size} of {header.payload_size} bytes")
            payload = memoryview(bytearray(size))
            check_payload(header, payload[: _read_into(file.fileno(), payload)])
    except OSError as error:
        raise _as_file_error(error) from error


def _write_all(descriptor: int, data: Buffer) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_up_to(descriptor: int, size: int) -> bytes:
    data = bytearray(size)
    return bytes(data[: _read_into(descriptor, memoryview(data))])


def _read_into(descriptor: int, buffer: memoryview) -> int:
    count = 0
    while count < len(buffer):
        step = os.readv(descriptor, [buffer[count:]])
        if not step:
            break
        count += step
    return count


_REASONS = {
    errno.ENOENT: "vanished",
    errno.ENOTDIR: "vanished",
    errno.ESTALE: "vanished",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
}


def _as_file_error(error: OSError) -> FileError:
    return FileError(_REASONS.get(error.errno or 0, "io"), str(error))


def walk(root: Path) -> Iterator[os.DirEntry[str]]:
    """All files below a folder, finished ones and temporary ones; folders that vanish meanwhile are left out."""
    waiting = [str(root)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        yield entry
        except OSError:
            continue
