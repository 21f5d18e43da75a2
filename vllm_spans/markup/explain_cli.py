"""``vllm-spans explain``: show what the markup of a request comes to on a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PATH = "/v1/spans/explain"
DEFAULT_URL = "http://127.0.0.1:8000"


class ExplainError(Exception):
    """The server could not be asked, or refused the request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "body",
        nargs="?",
        default="-",
        help="file with the JSON body of a chat completion or completion; - reads standard input",
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="the server's key, if it wants one (default: OPENAI_API_KEY)",
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")


def run(args: argparse.Namespace) -> int:
    """Ask the server and print its answer.

    Args:
        args: Parsed arguments of `add_arguments`.

    Returns:
        The exit code: 0, or 1 when the server could not be asked or refused the request.
    """
    try:
        answer = ask(args.url, read_body(args.body), args.api_key)
    except ExplainError as error:
        sys.stderr.write(f"vllm-spans explain: {error}\n")
        return 1
    text = json.dumps(answer, indent=2, ensure_ascii=False) if args.json else table(answer)
    sys.stdout.write(text + "\n")
    return 0


def read_body(source: str) -> dict[str, Any]:
    """Read a request body.

    Args:
        source: A file's name, or ``-`` for standard input.

    Raises:
        ExplainError: The file cannot be read or holds no JSON object.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        body = json.loads(text)
    except OSError as error:
        raise ExplainError(f"cannot read {source}: {error.strerror}") from error
    except ValueError as error:
        raise ExplainError(f"{source} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ExplainError(f"{source} must hold a JSON object, the body of a request")
    return body


def ask(url: str, body: dict[str, Any], api_key: str | None = None) -> dict[str, Any]:
    """Post a body to the explain endpoint.

    Args:
        url: The server, with or without ``/v1`` at its end.
        body: The body of a chat completion or completion.
        api_key: The server's key.

    Raises:
        ExplainError: No server there, a server without spans, or a refused request.
    """
    base = base_url(url)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(
            base + PATH, data=json.dumps(body).encode(), headers=headers, method="POST"
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise ExplainError(refusal(error.code, error.read(), str(error.reason))) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ExplainError(no_answer(base, getattr(error, "reason", error))) from error


def base_url(url: str) -> str:
    """The server's address without ``/v1``.

    Args:
        url: What the user gave.
    """
    return url.rstrip("/").removesuffix("/v1")


def no_answer(base: str, reason: object) -> str:
    """What to tell a user whose server does not answer, with the remedy."""
    return (
        f"no answer from {base}: {reason}. Start a server with `vllm-spans serve`, or give its "
        "address with --url"
    )


def refusal(status: int, body: bytes, phrase: str) -> str:
    """What to tell a user whose request was refused.

    Args:
        status: The answer's status.
        body: The answer.
        phrase: The status in words, for an answer that says nothing.
    """
    try:
        detail = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        detail = phrase
    if status == 404:
        if "model" in detail:
            return detail
        return "the server runs without spans: start it with VLLM_V1_SPANS_ENABLED=1"
    return f"HTTP {status}: {detail}"


def table(answer: dict[str, Any]) -> str:
    """The answer as a table for people.

    Args:
        answer: The endpoint's answer.
    """
    tiers = answer.get("tiers") or []
    header = ("", "kind", "start", "end", "tokens", "pads", "cached", *tiers, "text")
    rows = [header]
    for index, piece in enumerate(answer["pieces"]):
        counts = [piece["cached_tokens"]]
        counts += [(piece["tier_tokens"] or {}).get(tier) for tier in tiers]
        rows.append(
            (
                str(index),
                piece["kind"],
                str(piece["start"]),
                str(piece["end"]),
                str(piece["tokens"]),
                str(piece["pads"]),
                *("?" if count is None else str(count) for count in counts),
                json.dumps(piece["text"], ensure_ascii=False)[1:-1],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    lines = [
        f"{answer['model']}: {answer['prompt_tokens']} prompt tokens, "
        f"{answer['span_pad_tokens']} of them pads, {answer['spans']} spans; block size "
        f"{answer['block_size']}, gap policy {answer['gap_policy']}"
        + (f" (k = {answer['gap_length']})" if answer["gap_policy"] == "legolink" else ""),
        "",
    ]
    for row in rows:
        cells = [
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)
