"""The demo's parts that need no engine: the server's life, the counters, the table, the verdict."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from demo import __main__ as demo
from demo import metrics, serve, server

_SERVE = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(log):
    port = server.free_port()
    return server.Server([sys.executable, "-c", _SERVE, str(port)], port, log)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("leave_by", [None, RuntimeError, KeyboardInterrupt])
def test_no_process_of_the_server_outlives_the_block(tmp_path, leave_by):
    log = tmp_path / "log"
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), start(log) as running:
        running.wait_ready(timeout=60)
        child = int(log.read_text().split()[1])
        assert is_alive(child)
        if leave_by:
            raise leave_by
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_server_that_ends_early_is_reported_with_its_log(tmp_path):
    log = tmp_path / "log"
    code = "print('ValueError: the cause'); print('x\\n' * 100); raise SystemExit(3)"
    with server.Server([sys.executable, "-c", code], server.free_port(), log) as running:
        with pytest.raises(server.ServerError, match="status 3"):
            running.wait_ready(timeout=60)
        assert running.log_tail().startswith("ValueError: the cause")


def test_sigterm_runs_the_cleanup():
    with pytest.raises(SystemExit) as leave, server.stop_on_terminate():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert leave.value.code == 143


_PAGE = """\
# TYPE vllm_spans_reused_tokens_total counter
vllm_spans_reused_tokens_total{tier="gpu",model_name="m"} 64.0
vllm_spans_reused_tokens_total{tier="cpu",model_name="m"} 32.0
# TYPE vllm_spans_gap_tokens_total counter
vllm_spans_gap_tokens_total{policy="legolink"} 32.0
# TYPE vllm_spans_requests_total counter
vllm_spans_requests_total{outcome="planned"} 2.0
"""


def test_counters_are_summed_over_labels_and_subtracted():
    counts = metrics.parse(_PAGE)
    assert counts == metrics.SpanTokens(reused=96, gap=32, requests=2)
    assert counts - metrics.SpanTokens(reused=90, requests=1) == metrics.SpanTokens(6, 0, 32, 0, 1)


def result(name, ttft, answer="Karl von Frisch", reused=100):
    return demo.Result(name, 2600, metrics.SpanTokens(reused=reused), ttft, answer)


@pytest.mark.parametrize(
    ("warm", "accepted", "said"),
    [
        (result("warm: reversed", 1.0), True, "cold / warm: 5.0"),
        (result("warm: reversed", 4.0), True, "not met"),
        (result("warm: reversed", 1.0, answer="another"), False, "NOT the same"),
        (result("warm: reversed", 1.0, reused=0), False, "NOTHING"),
    ],
)
def test_verdict(capsys, warm, accepted, said):
    results = [result("cold: first use", 5.0, reused=0), warm, result("cold: reversed", 5.0)]
    assert demo.judge(results) is accepted
    assert said in capsys.readouterr().out


def test_table_has_one_line_per_request():
    text = demo.table([result("warm: reversed", 1.0), result("cold: first use", 12.0, "x " * 90)])
    lines = text.splitlines()
    assert len(lines) == 4
    assert "warm: reversed" in lines[2] and "1.00 s" in lines[2]
    assert lines[3].endswith("...")


def test_documents_are_eight_and_every_case_uses_all():
    documents = demo.load_documents()
    assert len(documents) == 8
    assert all(document.title and len(document.text.split()) > 200 for document in documents)
    for case in demo.cases(len(documents), quick=False):
        assert sorted(case.order) == list(range(8))


def test_demo_failure_prints_the_log_and_fails(tmp_path):
    code = (
        "import sys; from demo import __main__ as demo\n"
        "demo.server_command = lambda port: [sys.executable, '-c', 'raise ValueError(\"cause\")']\n"
        "sys.argv[1:] = []; sys.exit(demo.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "ValueError: cause" in done.stderr


def test_serve_offers_the_same_documents_in_two_orders(tmp_path):
    first, other = serve.write_requests(tmp_path, demo.load_documents())
    bodies = [json.loads(path.read_text()) for path in (first, other)]
    assert bodies[0]["documents"] == bodies[1]["documents"][::-1]
    assert bodies[0]["messages"] == bodies[1]["messages"]
