"""Show KV reuse on a real server: the same documents in other orders, behind other prompts."""

import argparse
import dataclasses
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import openai

from demo import metrics
from demo.server import Server, ServerError, free_port, stop_on_terminate

DOCUMENTS = Path(__file__).parent / "documents"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is a starter in sourdough baking?"
LIBRARIAN = "You answer questions about the given documents in one short sentence."
TEACHER = "You are a patient teacher. A pupil asks you about the texts below. Answer briefly."
GOAL = 4.0
ANSWER_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of the demo."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to put the documents into a prompt."""

    name: str
    system: str
    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one request cost and answered."""

    name: str
    prompt_tokens: int
    spans: metrics.SpanTokens
    ttft: float
    answer: str


def load_documents() -> list[Document]:
    """Read the shipped documents; the first line of each is its title."""
    documents = []
    for path in sorted(DOCUMENTS.glob("*.md")):
        title, _, text = path.read_text(encoding="utf-8").partition("\n")
        documents.append(Document(title.removeprefix("# ").strip(), text.strip()))
    return documents


def cases(count: int, quick: bool) -> list[Case]:
    """The first use of the documents, then other uses of them."""
    order = list(range(count))
    shuffled = order.copy()
    random.Random(7).shuffle(shuffled)
    others = [
        Case("reversed order", LIBRARIAN, tuple(reversed(order))),
        Case("shuffled, other system prompt", TEACHER, tuple(shuffled)),
        Case("odd ones first, other system prompt", TEACHER, tuple(order[1::2] + order[::2])),
    ]
    return [Case("first use", LIBRARIAN, tuple(order)), *others[: 1 if quick else None]]


class Client:
    """Sends the cases one after the other and measures each."""

    def __init__(self, url: str, documents: Sequence[Document]) -> None:
        self._url = url
        self._documents = documents
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600
        )

    def warm_up(self) -> None:
        """Let the engine's lazy set-up happen before anything is measured."""
        self._openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )

    def ask(self, case: Case, salt: str, name: str) -> Result:
        """Send one request.

        Args:
            case: System prompt and order of the documents.
            salt: Requests with different salts share no KV: a new one makes everything cold.
            name: Name of the row in the table.
        """
        documents = [dataclasses.asdict(self._documents[index]) for index in case.order]
        before = metrics.read(self._url)
        begin = time.perf_counter()
        stream = self._openai.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": case.system},
                {"role": "user", "content": QUESTION},
            ],
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"documents": documents, "cache_salt": salt},
        )
        first, answer, prompt_tokens = None, [], 0
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter()
                answer.append(chunk.choices[0].delta.content)
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
        if first is None:
            raise ServerError(f"the server answered nothing to {name!r}")
        spans = metrics.since(self._url, before)
        return Result(name, prompt_tokens, spans, first - begin, "".join(answer).strip())


def table(results: Sequence[Result]) -> str:
    """The results as a table for a terminal."""
    head = ("request", "prompt", "reused", "isolated", "gap", "pad", "TTFT", "answer")
    rows = [
        (
            result.name,
            str(result.prompt_tokens),
            str(result.spans.reused),
            str(result.spans.isolated),
            str(result.spans.gap),
            str(result.spans.pad),
            f"{result.ttft:.2f} s",
            shorten(result.answer, 56),
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if column in (0, len(head) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def shorten(text: str, length: int) -> str:
    """The first words of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3].rstrip() + "..."


class Progress:
    """One line that counts up on a terminal; a line now and then in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next = 10.0

    def __call__(self, seconds: float) -> None:
        if self._terminal:
            print(f"\r  starting ... {seconds:3.0f} s", end="", flush=True)
        elif seconds >= self._next:
            print(f"  starting ... {seconds:.0f} s", flush=True)
            self._next += 10.0

    def done(self, seconds: float) -> None:
        """Close the line."""
        start = "\r" if self._terminal else ""
        print(f"{start}  ready after {seconds:.0f} s    ".rstrip(), flush=True)


def server_command(port: int) -> list[str]:
    """The command that serves the embedded model on a loopback port."""
    serve = [sys.executable, "-m", "vllm_spans.cli", "serve"]
    # Eager: compiling the model takes minutes on a busy machine, and a demo starts in seconds.
    flags = ["--enforce-eager", "--disable-uvicorn-access-log"]
    return [*serve, "--host", "127.0.0.1", "--port", str(port), *flags]


def server_environ() -> dict[str, str]:
    """The demo's server reports no usage statistics."""
    return {**os.environ, "VLLM_NO_USAGE_STATS": "1"}


def run(server: Server, quick: bool) -> bool:
    """Send all requests and print what they showed.

    Args:
        server: A started server.
        quick: Send fewer requests.

    Returns:
        Whether the documents were reused and every warm answer equals its cold one.
    """
    progress = Progress()
    progress.done(server.wait_ready(progress))
    documents = load_documents()
    client = Client(server.url, documents)
    client.warm_up()

    first, *others = cases(len(documents), quick)
    # Each warm case is sent again under a salt of its own, where nothing of it is cached.
    plan = [(first, "demo", f"cold: {first.name}")]
    for number, case in enumerate(others):
        plan.append((case, "demo", f"warm: {case.name}"))
        plan.append((case, f"demo-cold-{number}", f"cold: {case.name}"))
    results = []
    for number, (case, salt, name) in enumerate(plan, start=1):
        print(f"  request {number} of {len(plan)}: {name} ...", end="", flush=True)
        results.append(client.ask(case, salt, name))
        print(f" {results[-1].ttft:.2f} s to the first token", flush=True)

    print("\n" + table(results) + "\n")
    return judge(results)


def judge(results: Sequence[Result]) -> bool:
    """Print the ratio of cold to warm and whether the answers agree."""
    warm = {r.name.removeprefix("warm: "): r for r in results if r.name.startswith("warm: ")}
    cold = {r.name.removeprefix("cold: "): r for r in results if r.name.startswith("cold: ")}
    ratio = statistics.median(r.ttft for r in cold.values()) / statistics.median(
        r.ttft for r in warm.values()
    )
    verdict = "met" if ratio >= GOAL else "not met on this machine at this moment"
    print(f"Time to the first token, cold / warm: {ratio:.1f} (goal {GOAL:.0f}: {verdict})")
    same = all(result.answer == cold[name].answer for name, result in warm.items())
    print(f"Warm and cold answers are {'the same' if same else 'NOT the same'} in all orders.")
    if not same:
        for name, result in warm.items():
            print(f"  {name}\n    warm: {result.answer}\n    cold: {cold[name].answer}")
    reused = all(result.spans.reused > 0 for result in warm.values())
    if not reused:
        print("A warm request reused NOTHING: spans do not work.")
    return same and reused


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one other order instead of three")
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="vllm_spans-demo-"))
    log, port = folder / "server.log", free_port()
    print(f"Starting the server with {MODEL} on port {port} (log: {log})", flush=True)
    keep_log = succeeded = False
    server = Server(server_command(port), port, log, server_environ())
    try:
        with stop_on_terminate(), server:
            succeeded = run(server, options.quick)
            print("Stopping the server.", flush=True)
    except KeyboardInterrupt:
        print("\nInterrupted; the server is stopped.", file=sys.stderr)
        return 130
    except (ServerError, openai.OpenAIError, OSError) as error:
        tail = server.log_tail()
        print(f"\nThe demo failed: {error}\n\nEnd of {log}:\n{tail}", file=sys.stderr)
        keep_log = True
        return 1
    finally:
        if not keep_log:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
