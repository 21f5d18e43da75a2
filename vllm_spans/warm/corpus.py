"""Reading a corpus: folders, text files and JSON lines to documents; pure.

A corpus is scanned first, for the totals that progress is shown against, and then read one document at a time,
so that it may be larger than memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

DEFAULT_GLOBS = ("*.txt", "*.md", "*.jsonl")
TitleSource = Literal["none", "name", "stem"]

_JSON_LINES = ".jsonl"


class CorpusError(Exception):
    """The corpus as a whole cannot be read; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that requests will hold as a span.

    Attributes:
        name: Where it comes from, for people: a file, or a file and a line.
        text: Its text.
        title: Its title, if it has one.
        size: Bytes that it takes in the corpus.
    """

    name: str
    text: str
    title: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A place of the corpus that gives no document.

    Attributes:
        name: The place.
        reason: What is wrong there.
        size: Bytes that it takes in the corpus.
    """

    name: str
    reason: str
    size: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """A scanned corpus.

    Attributes:
        files: Its files in order.
        documents: Documents in them, those that will turn out unreadable included.
        size: Bytes in them.
    """

    files: tuple[Path, ...]
    documents: int
    size: int


def scan(paths: Sequence[str], globs: Sequence[str] = DEFAULT_GLOBS) -> Corpus:
    """Find the files of a corpus and count its documents.

    Args:
        paths: Files, taken whatever their name, and folders, searched to any depth. Hidden files and folders and
            links to folders are left out.
        globs: Patterns, for the files of folders, that the end of a path has to match.

    Raises:
        CorpusError: A path does not exist, or no file was found.
    """
    files: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            files.update(dict.fromkeys(_walk(path, globs)))
        elif path.exists():
            files[path] = None
        else:
            raise CorpusError(f"there is no file or folder {given}")
    if not files:
        raise CorpusError(
            f"no file in {', '.join(paths)} matches {' or '.join(globs)}; name other patterns with --glob"
        )
    documents = size = 0
    for path in files:
        try:
            size += path.stat().st_size
            documents += _count(path)
        except OSError:
            # It is named when it is read.
            documents += 1
    return Corpus(tuple(files), documents, size)


def read(
    corpus: Corpus, title: TitleSource = "none", strip: bool = False
) -> Iterator[Document | Unreadable]:
    """Read the documents of a corpus, in order.

    Args:
        corpus: From ``scan``.
        title: Title of a text file's document: none, the file's name, or its name without the ending. A line of
            JSON says its own.
        strip: Take the white space off the ends of each text.
    """
    for path in corpus.files:
        if path.suffix == _JSON_LINES:
            yield from _read_lines(path, strip)
        else:
            yield _read_text(path, title, strip)


def _walk(root: Path, globs: Sequence[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and any(PurePath(path).match(glob) for glob in globs):
                yield path


def _count(path: Path) -> int:
    if path.suffix != _JSON_LINES:
        return 1
    with path.open("rb") as file:
        return max(1, sum(1 for line in file if line.strip()))


def _read_text(path: Path, title: TitleSource, strip: bool) -> Document | Unreadable:
    name, size = str(path), 0
    try:
        content = path.read_bytes()
        size = len(content)
        text = content.decode("utf-8")
    except OSError as error:
        return Unreadable(name, f"cannot be read: {error.strerror}", size)
    except UnicodeDecodeError as error:
        return Unreadable(name, f"is not UTF-8 (byte {error.start})", size)
    titles = {"none": None, "name": path.name, "stem": path.stem}
    return _checked(name, text, titles[title], size, strip)


def _read_lines(path: Path, strip: bool) -> Iterator[Document | Unreadable]:
    try:
        with path.open("rb") as file:
            is_empty = True
            for number, line in enumerate(file, 1):
                if line.strip():
                    is_empty = False
                    yield _read_line(f"{path}:{number}", line, strip)
            if is_empty:
                yield Unreadable(str(path), "is empty", path.stat().st_size)
    except OSError as error:
        yield Unreadable(str(path), f"cannot be read: {error.strerror}", 0)


def _read_line(name: str, line: bytes, strip: bool) -> Document | Unreadable:
    size = len(line)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(name, f"is not JSON: {error}", size)
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        return Unreadable(name, 'is no JSON object with a string "text"', size)
    title = found.get("title")
    if title is not None and not isinstance(title, str):
        return Unreadable(name, 'has a "title" that is no string', size)
    return _checked(name, found["text"], title, size, strip)


def _checked(
    name: str, text: str, title: str | None, size: int, strip: bool
) -> Document | Unreadable:
    bare = text.strip()
    if not bare:
        return Unreadable(name, "is empty", size)
    return Document(name, bare if strip else text, title, size)
