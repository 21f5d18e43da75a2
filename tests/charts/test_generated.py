"""Prevents: rules, dashboards, workloads and docs in the chart that are not the project's any more."""

from __future__ import annotations

import pytest

from charts.generate import BEGIN, END, ROOT, DocsError, generated, stale, values_table, with_table

DOCUMENTED = """
# The image.
image:
  # Where it is.
  repository: engine
  # Its tag | version.
  tag: ""
# What a pod may use.
resources:
  limits: {memory: 4Gi}
"""


def test_the_files_are_what_their_sources_say() -> None:
    """Otherwise: ``make chart-files``."""
    old = [
        str(path.relative_to(ROOT))
        for path, text in generated().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert old == []


def test_no_file_has_lost_its_source() -> None:
    assert stale() == []


def test_the_table_has_every_value_with_its_default() -> None:
    table = values_table(DOCUMENTED)
    assert '| `image.repository` | `"engine"` | Where it is. |' in table
    assert '| `image.tag` | `""` | Its tag \\| version. |' in table
    assert '| `resources` | `{"limits": {"memory": "4Gi"}}` | What a pod may use. |' in table


def test_a_value_without_a_comment_is_refused() -> None:
    with pytest.raises(DocsError, match=r"line 6: image\.tag has no comment"):
        values_table(DOCUMENTED.replace("  # Its tag | version.\n", ""))


def test_a_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(DocsError, match=END):
        with_table(f"# Chart\n{BEGIN}\n", "table")
    assert with_table(f"a\n{BEGIN}\nold\n{END}\nb", "new\n") == f"a\n{BEGIN}\nnew\n{END}\nb"
