"""A slow file system, by FUSE: a folder shown at another place, whose reads and looks take as long as told.

It speaks the kernel's protocol itself (``linux/fuse.h``, version 7.31), so that it needs no library, only root and
``/dev/fuse``. Run as ``python -m tests.offload.slow_files SOURCE MOUNT DELAY``; ``DELAY`` is a file with seconds
for a read and for a look at whether there is a file, read before each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.harness import ROOT

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_DIRECT_IO = 1
_MAX_WRITE = 1 << 20

Answer = bytes | int | None
"""Body of an answer, an error number, or no answer at all."""


class SlowFiles:
    """The server's side.

    Args:
        source: Folder that is shown.
        device: Open ``/dev/fuse``.
        delay: File with the seconds that a read and a look take.
    """

    def __init__(self, source: str, device: int, delay: Path) -> None:
        self._device = device
        self._delay = delay
        self._lock = threading.Lock()
        self._paths = {1: source}
        self._nodes = itertools.count(2)
        self._handlers: dict[int, Callable[[int, bytes], Answer]] = {
            1: self._lookup,
            2: lambda node, body: None,
            3: lambda node, body: struct.pack("<QII", 0, 0, 0) + _attributes(self._paths[node]),
            4: self._set_attributes,
            9: self._make_folder,
            10: lambda node, body: self._remove(os.unlink, node, body),
            11: lambda node, body: self._remove(os.rmdir, node, body),
            12: lambda node, body: self._rename(node, body, 8),
            14: self._open,
            15: self._read,
            16: self._write,
            17: lambda node, body: struct.pack("<5Q4I24x", 1 << 20, 1 << 19, 1 << 19, 0, 0, 4096, 255, 4096, 0),
            18: lambda node, body: self._close(body),
            25: lambda node, body: b"",
            26: lambda node, body: struct.pack(
                "<4IHHIIHHI28x", 7, 31, 0, 0, 64, 64, _MAX_WRITE, 1, 0, 0, 0
            ),
            27: lambda node, body: struct.pack("<QII", 0, 0, 0),
            28: self._list,
            29: lambda node, body: b"",
            35: self._create,
            36: lambda node, body: None,
            42: lambda node, body: None,
            45: lambda node, body: self._rename(node, body, 16),
        }  # fmt: skip

    def serve(self) -> None:
        """Answer until the file system is unmounted."""
        with ThreadPoolExecutor(16) as threads:
            while True:
                try:
                    request = os.read(self._device, _MAX_WRITE + 8192)
                except OSError as error:
                    if error.errno == errno.ENODEV:
                        return
                    if error.errno in (errno.EINTR, errno.ENOENT):
                        continue
                    raise
                threads.submit(self._answer, request)

    def _answer(self, request: bytes) -> None:
        _, code, unique, node, *_ = _IN.unpack_from(request)
        handler = self._handlers.get(code)
        try:
            answer = errno.ENOSYS if handler is None else handler(node, request[_IN.size :])
        except KeyError:
            answer = errno.ESTALE
        except OSError as error:
            answer = error.errno or errno.EIO
        if answer is None:
            return
        error, body = (0, answer) if isinstance(answer, bytes) else (answer, b"")
        # A request whose process has gone is known no more.
        with contextlib.suppress(OSError):
            os.write(self._device, _OUT.pack(_OUT.size + len(body), -error, unique) + body)

    def _entry(self, path: str) -> bytes:
        attributes = _attributes(path)
        with self._lock:
            node = next((n for n, known in self._paths.items() if known == path), None)
            if node is None:
                node = next(self._nodes)
                self._paths[node] = path
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + attributes

    def _child(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], name.rstrip(b"\0").decode())

    def _wait(self, which: int) -> None:
        time.sleep(float(self._delay.read_text().split()[which]))

    def _lookup(self, node: int, body: bytes) -> Answer:
        self._wait(1)
        return self._entry(self._child(node, body))

    def _set_attributes(self, node: int, body: bytes) -> Answer:
        path = self._paths[node]
        valid, _, _, size, _, atime, mtime, _, _, _, _, mode = struct.unpack_from("<II6Q3II", body)
        if valid & 1:
            os.chmod(path, mode & 0o7777)
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32):
            now = valid & (128 | 256)
            os.utime(path, None if now else (atime, mtime))
        return struct.pack("<QII", 0, 0, 0) + _attributes(path)

    def _make_folder(self, node: int, body: bytes) -> Answer:
        path = self._child(node, body[8:])
        os.mkdir(path)
        return self._entry(path)

    def _remove(self, remove: Callable[[str], None], node: int, body: bytes) -> Answer:
        remove(self._child(node, body))
        return b""

    def _rename(self, node: int, body: bytes, names_at: int) -> Answer:
        (target,) = struct.unpack_from("<Q", body)
        old, new = body[names_at:].rstrip(b"\0").split(b"\0")
        source, path = self._child(node, old), self._child(target, new)
        os.replace(source, path)
        with self._lock:
            self._paths = {n: p for n, p in self._paths.items() if p != path}
            self._paths = {n: path if p == source else p for n, p in self._paths.items()}
        return b""

    def _open(self, node: int, body: bytes) -> Answer:
        (flags,) = struct.unpack_from("<I", body)
        return struct.pack("<QII", os.open(self._paths[node], flags), _DIRECT_IO, 0)

    def _create(self, node: int, body: bytes) -> Answer:
        flags, mode = struct.unpack_from("<II", body)
        path = self._child(node, body[16:])
        handle = os.open(path, flags | os.O_CREAT, mode & 0o7777)
        return self._entry(path) + struct.pack("<QII", handle, _DIRECT_IO, 0)

    def _read(self, node: int, body: bytes) -> Answer:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._wait(0)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> Answer:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _close(self, body: bytes) -> Answer:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _list(self, node: int, body: bytes) -> Answer:
        _, offset, room = struct.unpack_from("<QQI", body)
        entries = b""
        names = sorted(os.listdir(self._paths[node]))
        for number, name in enumerate(names[offset:], offset + 1):
            raw = name.encode()
            entry = struct.pack("<QQII", number, number, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(entries) + len(entry) > room:
                break
            entries += entry
        return entries


def _attributes(path: str) -> bytes:
    s = os.lstat(path)
    times = (int(s.st_atime), int(s.st_mtime), int(s.st_ctime))
    owner = (s.st_mode, s.st_nlink, s.st_uid, s.st_gid)
    return struct.pack(
        "<6Q10I", s.st_ino, s.st_size, s.st_blocks, *times, 0, 0, 0, *owner, 0, 4096, 0
    )


def main(source: str, mount: str, delay: str) -> None:
    """Mount, say so on standard output, and serve.

    Raises:
        OSError: The file system cannot be mounted.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"slow", mount.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    SlowFiles(source, device, Path(delay)).serve()


class SlowFolder:
    """A mounted slow file system.

    Attributes:
        path: Where it is.
    """

    def __init__(self, path: Path, delay: Path) -> None:
        self.path = path
        self._delay = delay

    def take(self, seconds: float, look: float = 0) -> None:
        """Let every read, and every look at whether there is a file, take so long from now on."""
        new = self._delay.with_suffix(".new")
        new.write_text(f"{seconds} {look}")
        new.replace(self._delay)


@contextlib.contextmanager
def slow_folder(folder: Path) -> Iterator[SlowFolder]:
    """A slow file system below ``folder``; the test is skipped where none can be mounted."""
    source, mount, delay = folder / "source", folder / "slow", folder / "delay"
    source.mkdir()
    mount.mkdir()
    delay.write_text("0 0")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.offload.slow_files", str(source), str(mount), str(delay)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert server.stdout and server.stderr
    try:
        if server.stdout.readline() != "mounted\n":
            server.wait()
            pytest.skip(f"FUSE cannot be mounted here: {server.stderr.read()[-200:]}")
        try:
            yield SlowFolder(mount, delay)
        finally:
            # Lazily: an engine may still hold files.
            subprocess.run(["umount", "-l", str(mount)], check=True)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
