"""Prevents: documents of a corpus left out, read wrong, or failing without being named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_spans.warm.corpus import CorpusError, Document, Unreadable, read, scan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "deep.md").write_text("deep")
    (tmp_path / "a.txt").write_text("  über\n")
    (tmp_path / "c.rst").write_text("other")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    return tmp_path


def names(found: list[Document | Unreadable], root: Path) -> list[str]:
    return [os.path.relpath(document.name, root) for document in found]


def test_folders_are_searched_to_any_depth(folder: Path) -> None:
    corpus = scan([str(folder)])
    found = list(read(corpus))
    assert names(found, folder) == ["a.txt", "b/deep.md"]
    assert corpus.documents == 2
    assert corpus.size == sum(document.size for document in found) == 8 + 4
    assert found[0] == Document(str(folder / "a.txt"), "  über\n", None, 8)


def test_patterns_replace_the_default_and_files_need_none(folder: Path) -> None:
    assert names(list(read(scan([str(folder)], ["*.rst"]))), folder) == ["c.rst"]
    assert names(list(read(scan([str(folder)], ["b/*"]))), folder) == ["b/deep.md"]
    given = [str(folder / "c.rst"), str(folder), str(folder / "a.txt")]
    assert names(list(read(scan(given))), folder) == ["c.rst", "a.txt", "b/deep.md"]


def test_titles_and_white_space(folder: Path) -> None:
    corpus = scan([str(folder / "a.txt")])
    titles = [next(read(corpus, title)).title for title in ("none", "name", "stem")]  # type: ignore[union-attr]
    assert titles == [None, "a.txt", "a"]
    assert next(read(corpus, strip=True)).text == "über"  # type: ignore[union-attr]


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"title": "T", "text": "one", "id": 5}),
        "",
        json.dumps({"text": "two\n"}),
        "{",
        json.dumps({"title": "no text"}),
        json.dumps({"title": 5, "text": "x"}),
        json.dumps({"text": " \n"}),
        json.dumps(["x"]),
    ]
    path.write_text("\n".join(lines))
    corpus = scan([str(tmp_path)])
    found = list(read(corpus))
    assert corpus.documents == len(found) == 7
    good = [document for document in found if isinstance(document, Document)]
    assert [(d.name, d.title, d.text) for d in good] == [
        (f"{path}:1", "T", "one"),
        (f"{path}:3", None, "two\n"),
    ]
    bad = {d.name.rpartition(":")[2]: d.reason for d in found if isinstance(d, Unreadable)}
    assert bad["4"].startswith("is not JSON")
    assert bad["5"] == bad["8"] == 'is no JSON object with a string "text"'
    assert "title" in bad["6"]
    assert bad["7"] == "is empty"


def test_files_that_give_no_document_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.md").write_text(" \n\t")
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    corpus = scan([str(tmp_path)])
    found = list(read(corpus))
    assert corpus.documents == len(found) == 5
    assert all(isinstance(document, Unreadable) for document in found)
    reasons = {Path(d.name).name: d.reason for d in found if isinstance(d, Unreadable)}
    assert reasons["empty.txt"] == reasons["blank.md"] == reasons["none.jsonl"] == "is empty"
    assert reasons["latin.txt"] == "is not UTF-8 (byte 1)"
    assert reasons["gone.txt"] == "cannot be read: No such file or directory"


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"there is no file or folder .*nowhere"):
        scan([str(tmp_path / "nowhere")])
    with pytest.raises(CorpusError, match=r"matches \*\.pdf; name other patterns with --glob"):
        scan([str(tmp_path)], ["*.pdf"])
