"""Prevents a comparison of spans with themselves, or of servers that differ in more than the plugin."""

from __future__ import annotations

from loadtests.servers import server_command


def test_both_servers_differ_in_the_plugin_alone() -> None:
    given = {"PATH": "/bin", "VLLM_V1_SPANS_GAP_POLICY": "none"}
    stock, spans = (server_command(spans, 1234, given) for spans in (False, True))
    assert stock.command == spans.command
    assert stock.environ["VLLM_PLUGINS"] == ""
    assert not any(name.startswith("VLLM_V1_SPANS_") for name in stock.environ)
    assert spans.environ["VLLM_V1_SPANS_ENABLED"] == "1"
    others = {
        name
        for name in stock.environ.keys() | spans.environ.keys()
        if stock.environ.get(name) != spans.environ.get(name)
    }
    assert others == {"VLLM_PLUGINS", "VLLM_V1_SPANS_ENABLED", "VLLM_V1_SPANS_GAP_POLICY"}
