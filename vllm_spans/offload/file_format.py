"""The header of a cached block's file: what it holds, for which model, and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

FORMAT_VERSION = 1
MAGIC = b"vspanskv"

_HEAD = struct.Struct("<8sHH")
_BODY = struct.Struct("<16s32s32s32sQI")
_CHECK = struct.Struct("<I")
HEADER_SIZE = _HEAD.size + _BODY.size + _CHECK.size
"""Bytes in front of the payload."""

Buffer = bytes | bytearray | memoryview


class FileError(Exception):
    """A file cannot be used.

    Attributes:
        reason: One word for the counters.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class BadFileError(FileError):
    """The file's content is not what is asked for, and never will be."""


@dataclass(frozen=True)
class Identity:
    """What makes the KV in a file fit an engine.

    Attributes:
        model: What the values depend on: weights, RoPE, quantisation.
        geometry: What the layout of the bytes depends on: layers, page sizes, block size.
        dtype: Element type, at most 16 ASCII characters.
        payload_size: Bytes of one block.
    """

    model: Mapping[str, object]
    geometry: Mapping[str, object]
    dtype: str
    payload_size: int

    @property
    def model_digest(self) -> bytes:
        """SHA-256 of ``model``."""
        return _digest(self.model)

    @property
    def geometry_digest(self) -> bytes:
        """SHA-256 of ``geometry`` and the payload size."""
        return _digest({"geometry": self.geometry, "payload_size": self.payload_size})

    @property
    def fingerprint(self) -> str:
        """Short name of the whole, for folders."""
        whole = self.model_digest + self.geometry_digest + self.dtype.encode()
        return hashlib.sha256(whole).hexdigest()[:16]


@dataclass(frozen=True)
class Header:
    """A header that is whole, as it was read.

    Attributes:
        dtype: Element type.
        model: SHA-256 of the model's identity.
        geometry: SHA-256 of the geometry.
        key: SHA-256 of the block's key.
        payload_size: Bytes behind the header.
        payload_crc: CRC-32 of them.
    """

    dtype: str
    model: bytes
    geometry: bytes
    key: bytes
    payload_size: int
    payload_crc: int


def encode_header(identity: Identity, key: bytes, payload: Buffer) -> bytes:
    """Header of a file that holds ``payload`` under ``key``."""
    body = _BODY.pack(
        identity.dtype.encode("ascii"),
        identity.model_digest,
        identity.geometry_digest,
        hashlib.sha256(key).digest(),
        len(payload),
        zlib.crc32(payload),
    )
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, HEADER_SIZE) + body
    return head + _CHECK.pack(zlib.crc32(head))


def decode_header(data: Buffer) -> Header:
    """Read a header.

    Args:
        data: The first ``HEADER_SIZE`` bytes of a file, or fewer if it is shorter.

    Raises:
        BadFileError: ``truncated``, ``format``, ``version`` or ``header``.
    """
    if len(data) < _HEAD.size:
        raise BadFileError("truncated", f"{len(data)} bytes are no header")
    magic, version, size = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadFileError("format", f"the file begins with {magic!r}")
    if version != FORMAT_VERSION:
        raise BadFileError("version", f"format version {version}, not {FORMAT_VERSION}")
    if len(data) < HEADER_SIZE:
        raise BadFileError("truncated", f"{len(data)} bytes are no header")
    (check,) = _CHECK.unpack_from(data, HEADER_SIZE - _CHECK.size)
    if size != HEADER_SIZE or check != zlib.crc32(bytes(data[: HEADER_SIZE - _CHECK.size])):
        raise BadFileError("header", "the header's checksum does not match")
    dtype, model, geometry, key, payload_size, payload_crc = _BODY.unpack_from(data, _HEAD.size)
    return Header(
        dtype.rstrip(b"\0").decode("ascii", "replace"),
        model,
        geometry,
        key,
        payload_size,
        payload_crc,
    )


def check_header(header: Header, identity: Identity, key: bytes) -> None:
    """Refuse a file that is not for this engine and this key.

    Raises:
        BadFileError: ``dtype``, ``model``, ``geometry`` or ``key``.
    """
    if header.dtype != identity.dtype:
        raise BadFileError("dtype", f"{header.dtype}, not {identity.dtype}")
    if header.model != identity.model_digest:
        raise BadFileError("model", "the file was written with another model")
    if header.geometry != identity.geometry_digest:
        raise BadFileError("geometry", "the file was written with another cache geometry")
    if header.key != hashlib.sha256(key).digest():
        raise BadFileError("key", "the file holds another block")


def check_payload(header: Header, payload: Buffer) -> None:
    """Refuse a payload that is not the one that was written.

    Raises:
        BadFileError: ``truncated`` or ``checksum``.
    """
    if len(payload) != header.payload_size:
        raise BadFileError("truncated", f"{len(payload)} of {header.payload_size} bytes")
    if zlib.crc32(payload) != header.payload_crc:
        raise BadFileError("checksum", "the payload's checksum does not match")


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
