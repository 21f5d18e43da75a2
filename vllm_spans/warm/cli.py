"""``vllm-spans warm``: its arguments, and what it prints and returns."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from vllm_spans.markup.explain_cli import DEFAULT_URL
from vllm_spans.warm.client import Server, ServerError
from vllm_spans.warm.corpus import DEFAULT_GLOBS, Corpus, CorpusError, read, scan
from vllm_spans.warm.forms import FORMS, Form
from vllm_spans.warm.progress import Reporter, Tally, summary
from vllm_spans.warm.runner import Runner, Settings

_DESCRIPTION = """\
Compute the documents of a corpus on a running server ahead of the requests over them, so that
already the first of these finds its spans cached.

DIR is searched to any depth for text files (a document each) and .jsonl files (a document per
line: {"text": ..., "title": ...}, the title optional). A FILE is taken whatever its name.

The server is asked for each document first, and what it holds is not sent again: a run that was
ended goes on where it was when it is started anew, and needs no state file.
"""

_EPILOG = """\
A request finds a warmed document only if it holds the same text in the same form, with the same
title, model and cache salt: see --form, --title and docs/warm.md.

exit status: 0 when every document is cached, 1 when some are not (each is named), 2 when there
is nothing to do or a setting is wrong, 130 after Ctrl-C

examples:
  vllm-spans warm ./documents
  vllm-spans warm --form part --glob '*.rst' --url http://gpu-7:8000 ./documents
  vllm-spans warm --check corpus.jsonl
      Send nothing; tell how much of the corpus is cached now.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: The command's parser.
    """
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="+", metavar="DIR|FILE", help="the corpus")
    corpus = parser.add_argument_group("the corpus")
    corpus.add_argument(
        "--glob",
        action="append",
        metavar="PATTERN",
        help=f"files of a DIR to take, may be repeated (default: {' '.join(DEFAULT_GLOBS)})",
    )
    form = parser.add_argument_group("the form in which requests will hold the documents")
    form.add_argument(
        "--form",
        choices=FORMS,
        default="documents",
        help='documents: the `documents` of a chat; part: a content part with "span": true that '
        "another part follows; text: text between delimiters (default: %(default)s)",
    )
    form.add_argument(
        "--title",
        choices=("none", "name", "stem"),
        default="none",
        help="title of a text file in the form documents: none, the file's name, or its name without "
        "the ending (default: %(default)s)",
    )
    form.add_argument(
        "--strip",
        action="store_true",
        help="take the white space off the ends of each text, for requests that do so too",
    )
    form.add_argument("--delimiter", metavar="TEXT", help="the server's, for --form text")
    form.add_argument(
        "--alone",
        action="store_true",
        help="for requests with one document each, to a model whose chat template renders "
        "`documents` itself: send each without another one beside it",
    )
    form.add_argument(
        "--model", help="the model, or the name of a LoRA adapter (default: the server's first)"
    )
    form.add_argument("--cache-salt", metavar="SALT", help="the tenant's salt")
    server = parser.add_argument_group("the server")
    server.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    server.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="the server's key, if it wants one (default: OPENAI_API_KEY)",
    )
    server.add_argument(
        "--concurrency",
        type=_positive,
        default=4,
        metavar="N",
        help="requests at a time (default: %(default)s)",
    )
    server.add_argument(
        "--batch-tokens",
        type=_positive,
        default=2048,
        metavar="N",
        help="put small documents together into requests of up to so many tokens "
        "(default: %(default)s; 1 sends each on its own)",
    )
    server.add_argument(
        "--retries",
        type=_count,
        default=5,
        metavar="N",
        help="further tries, with longer and longer pauses, when the server is overloaded or away "
        "(default: %(default)s)",
    )
    server.add_argument(
        "--timeout",
        type=_positive,
        default=600,
        metavar="SECONDS",
        help="wait so long for an answer (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="send what is cached too")
    parser.add_argument("--check", action="store_true", help="send nothing, tell what is cached")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(args: argparse.Namespace) -> int:
    """Warm a corpus.

    Args:
        args: Parsed arguments of ``add_arguments``.

    Returns:
        The exit code, as the help text says.
    """
    reporter = Reporter(sys.stderr, rewrites=sys.stderr.isatty(), quiet=args.quiet)
    problem = None
    if args.form == "text" and not args.delimiter:
        problem = "--form text needs the server's --delimiter"
    elif args.delimiter and args.form != "text":
        problem = "--delimiter is for --form text"
    elif args.check and args.force:
        problem = "--check sends nothing, so it does not go with --force"
    if problem is None:
        try:
            corpus = scan(args.paths, args.glob or DEFAULT_GLOBS)
        except CorpusError as error:
            problem = str(error)
    if problem is not None:
        reporter.note(f"vllm-spans warm: {problem}")
        return 2

    tally = Tally(corpus.documents, corpus.size)
    code = 0
    try:
        asyncio.run(_warm(args, corpus, tally, reporter))
    except ServerError as error:
        tally.ended_by, code = str(error), 1
        reporter.note(f"vllm-spans warm: {error}")
    except KeyboardInterrupt:
        tally.ended_by, code = "interrupted; start it again to go on", 130
    reporter.close()
    if args.json:
        text = json.dumps(tally.as_dict(), indent=2, ensure_ascii=False)
    else:
        text = summary(tally)
    sys.stdout.write(text + "\n")
    return code or int(bool(tally.failures or tally.missing))


async def _warm(args: argparse.Namespace, corpus: Corpus, tally: Tally, reporter: Reporter) -> None:
    async with Server(
        args.url, api_key=args.api_key, timeout=args.timeout, retries=args.retries
    ) as server:
        model = await server.find_model(args.model)
        form = Form(args.form, model.name, args.delimiter, args.cache_salt, args.alone)
        settings = Settings(args.concurrency, args.batch_tokens, args.force, args.check)
        runner = Runner(server, model, form, settings, tally, reporter)
        await runner.run(read(corpus, args.title, args.strip))


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value
