"""Prevents: an exporter or a status that works in parts only: the commands run as users run them, over real HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.server import free_port
from tests.exporter import engines
from tests.exporter.engines import EnginePods, engine_page, wait_until
from tests.exporter.process import ExporterProcess

FLAGS = ("--interval", "0.5", "--timeout", "0.4", "--window", "30")
COUNTERS = {
    "lookup_tokens": 400.0,
    "reused_tokens/gpu": 200.0,
    "reused_tokens/file": 100.0,
    "isolated_tokens": 100.0,
    "gap_tokens/legolink": 60.0,
    "pad_tokens": 10.0,
    "requests/warm": 3.0,
    "load_failures/checksum": 2.0,
    "store_failures/no_space": 1.0,
    "rejected/offsets": 4.0,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[EnginePods]:
    with EnginePods() as running:
        yield running


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_spans.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_fleet_is_exported_and_shown(servers: EnginePods, tmp_path: Path) -> None:
    now = time.time()
    old = servers.open(engine_page(COUNTERS, started=now - 1000))
    listed = tmp_path / "targets.txt"
    listed.write_text(f"# engines\n\n{old.url}\n")
    with ExporterProcess("--targets-file", str(listed), *FLAGS) as process:
        process.wait_ready()
        assert process.value("vllm_spans_fleet_lookup_tokens_total", model="tiny") == 0
        assert not process.samples("vllm_spans_fleet_reuse_ratio")
        new = servers.open(engine_page(COUNTERS, started=time.time(), hot={"abc": 7, "def": 9}))
        off = servers.open("# HELP x y\n# TYPE x gauge\nx 1\n")
        listed.write_text(f"{old.url}\n{new.url}\n{off.url}\n")
        wait_until(
            lambda: (
                process.value("vllm_spans_fleet_pods", state="ready") == 2
                and process.value("vllm_spans_fleet_pods", state="no_spans", model="unknown") == 1
            ),
            "the new servers are found",
        )
        for name, value in COUNTERS.items():
            counter, _, label = name.partition("/")
            found = process.samples(f"vllm_spans_fleet_{counter}_total")
            assert sum(v for own, v in found if label in own.values() or not label) == value, name
            assert all(own["model"] == "tiny" for own, _ in found)
        assert process.value("vllm_spans_fleet_reuse_ratio", model="tiny") == 0.75
        assert process.value("vllm_spans_fleet_gap_recompute_ratio", model="tiny") == 0.2
        assert process.samples("vllm_spans_fleet_hot_span_requests") == [
            ({"model": "tiny", "span": "def"}, 9),
            ({"model": "tiny", "span": "abc"}, 7),
        ]
        assert not process.samples("vllm_spans_exporter_watch_connected"), "nothing is watched"
        assert process.value("vllm_spans_exporter_last_cycle_seconds") is not None
        assert "vllm_spans_lookup_tokens" not in process.page(), "under the engine's own name"

        shown = run("status", "--url", process.url)
        assert shown.returncode == 0, shown.stderr
        for text in ("MODEL tiny", "2 ready", "0.750", "0.200", "gpu 200, file 100", "def 9"):
            assert text.replace("gpu 200, file 100", "file 100, gpu 200") in shown.stdout
        told = json.loads(run("status", "--url", process.url, "--json").stdout)
        assert told["models"]["tiny"]["counters"]["load_failures"]["checksum"] == 2
        assert told["models"]["tiny"]["reuse_ratio"] == 0.75
        assert told["models"]["tiny"]["hot_spans"][0] == {"span": "def", "requests": 9}

        # The old server is started anew and counts more than before by the time it is seen again.
        old.page = engine_page({**COUNTERS, "lookup_tokens": 404.0}, started=time.time())
        wait_until(
            lambda: process.value("vllm_spans_fleet_lookup_tokens_total") == 804, "it is counted"
        )
        listed.write_text(f"{old.url}\nno address\n")
        wait_until(lambda: "the targets stay as they were" in process.log(), "it is told")
        listed.write_text(f"{old.url}\n")
        wait_until(lambda: process.value("vllm_spans_fleet_pods", state="ready") == 1, "it is gone")
        assert process.value("vllm_spans_fleet_lookup_tokens_total") == 804
        assert not process.samples("vllm_spans_fleet_hot_span_requests"), "a stale label stays"
        assert process.end() == 0
        assert "Traceback" not in process.log()


@pytest.mark.parametrize(
    ("behave", "state"),
    [
        (engines.hang, "timeout"),
        (engines.drip, "timeout"),
        (engines.answer_garbage, "invalid"),
        (engines.answer_no_http, "invalid"),
        (engines.answer_html, "invalid"),
        (engines.answer_half_a_line, "invalid"),
        (engines.break_off, "invalid"),
        (engines.answer_500, "http_error"),
        (engines.answer_a_gibibyte, "too_large"),
    ],
)
def test_each_way_to_misbehave_has_a_state_and_a_line_and_passes(
    servers: EnginePods,
    shared: ExporterProcess,
    victim: engines.EnginePod,
    behave: engines.Behaviour,
    state: str,
) -> None:
    victim.behave = behave
    wait_until(
        lambda: shared.value("vllm_spans_fleet_pods", model="tiny", state=state) == 1,
        f"the pod is {state}",
    )
    assert f"127.0.0.1:{victim.port}: {state}: " in shared.log()
    victim.behave = engines.answer_well
    wait_until(
        lambda: shared.value("vllm_spans_fleet_pods", model="tiny", state="ready") == 2,
        "the pod is ready again",
    )
    assert shared.value("vllm_spans_fleet_lookup_tokens_total", model="tiny") == 0
    assert "Traceback" not in shared.log()


@pytest.fixture(scope="module")
def victim(servers: EnginePods) -> engines.EnginePod:
    return servers.open(engine_page(COUNTERS, started=1.0))


@pytest.fixture(scope="module")
def shared(servers: EnginePods, victim: engines.EnginePod) -> Iterator[ExporterProcess]:
    steady = servers.open(engine_page(COUNTERS, started=1.0))
    with ExporterProcess("--target", victim.url, "--target", steady.url, *FLAGS) as process:
        process.wait_ready()
        yield process


def test_many_pods_that_hang_keep_no_other_waiting(servers: EnginePods) -> None:
    hanging = [servers.open() for _ in range(12)]
    for server in hanging:
        server.behave = engines.hang
    good = servers.open(engine_page(COUNTERS, started=1.0))
    targets = [flag for server in (*hanging, good) for flag in ("--target", server.url)]
    flags = ("--interval", "1", "--timeout", "0.9", "--window", "30", "--concurrency", "2")
    with ExporterProcess(*targets, *flags) as process:
        wait_until(
            lambda: (
                (process.value("vllm_spans_exporter_scrapes_total", result="timeout") or 0) > 12
            ),
            "all have hung once",
        )
        before, asked = good.asked, sum(server.asked for server in hanging)
        wait_until(lambda: good.asked >= before + 6, "the good one is asked")
        # Two at a time: in the six seconds of six good scrapes no more than about two a second.
        assert sum(server.asked for server in hanging) - asked < 4 * (good.asked - before)


def test_an_address_in_use_and_wrong_arguments_are_told_in_one_line(servers: EnginePods) -> None:
    server = servers.open(engine_page())
    target = ("--target", server.url)
    for arguments, said in (
        ((*target, "--listen", f"127.0.0.1:{server.port}"), "cannot listen"),
        (("--target", "gpu-1:8000"), "write http://HOST:PORT"),
        (("--targets-file", "/nowhere"), "cannot be read"),
        ((*target, "--namespace", "x"), "either servers"),
        ((*target, "--selector", "a=b"), "either servers"),
        ((*target, "--port", "9"), "either servers"),
        (("--namespace", "x", "--all-namespaces"), "either --namespace"),
        (("--kubeconfig", "/nowhere"), "--kubeconfig FILE"),
        ((*target, "--timeout", "20"), "less than --interval"),
        ((*target, "--window", "20"), "twice --interval"),
    ):
        done = run("exporter", *arguments)
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_status_asks_servers_itself(servers: EnginePods) -> None:
    server = servers.open(engine_page(COUNTERS, started=1.0))
    down = f"http://127.0.0.1:{free_port()}"
    done = run("status", "--json", "--target", server.url, "--target", down)
    told = json.loads(done.stdout)
    assert told["ratios_of"] == "since the pods started"
    assert told["models"]["tiny"]["reuse_ratio"] == 0.75
    assert told["models"]["tiny"]["pods"]["ready"] == 1
    assert told["models"]["unknown"]["pods"]["unreachable"] == 1


def test_status_says_why_there_is_none(servers: EnginePods) -> None:
    engine = servers.open(engine_page())
    nobody = f"http://127.0.0.1:{free_port()}"
    for arguments, said in (
        (("--url", nobody), "no answer from an exporter"),
        (("--url", engine.url), "--target"),
        (("--url", engine.url, "--target", engine.url), "either --url"),
        (("--url", engine.url, "--selector", "a=b"), "either --url"),
    ):
        done = run("status", *arguments)
        assert done.returncode == 1
        assert said in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_status_shows_it_again_and_again(servers: EnginePods) -> None:
    server = servers.open(engine_page(COUNTERS, started=1.0))
    command = [sys.executable, "-m", "vllm_spans.cli", "status", "--watch", "0.1", "--json"]
    with subprocess.Popen(
        [*command, "--target", server.url], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        first = json.loads(running.stdout.readline())
        server.behave = engines.answer_500
        wait_until(lambda: '"http_error": 1' in running.stdout.readline(), "the change is shown")
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert first["models"]["tiny"]["pods"]["ready"] == 1


def test_without_the_kubernetes_client_servers_can_still_be_named() -> None:
    code = (
        "import sys\nsys.modules['kubernetes'] = None\n"
        "from vllm_spans import cli\n"
        "sys.exit(cli.main(['exporter', '--namespace', 'llm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "install vllm_spans[exporter], or name the servers with --target" in done.stderr


@pytest.mark.parametrize("command", ["exporter", "status"])
def test_help_teaches_and_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom vllm_spans import cli\n"
        f"try: cli.main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'vllm', 'torch', 'kubernetes'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    assert f"vllm-spans {command} --namespace llm" in done.stdout
