# SPDX-License-Identifier: Apache-2.0
"""The documentation site, built as `make docs` does it: a warning, such as a link that leads nowhere, fails."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import bagua
import pytest

pytest.importorskip("furo", reason="the site's generator is not installed: pip install sphinx furo myst-parser")
if find_spec("lightning") is None:  # not imported, which takes seconds, for tests that are not run
    pytest.skip("Lightning is not installed: pip install lightning", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SECONDS = 300


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    first = (site / "index.html").read_text()
    for page in (
        "why",
        "install",
        "quick_start",
        "lightning",
        "algorithms",
        "several_machines",
        "troubleshooting",
        "migration",
    ):
        assert f'href="{page}.html"' in first
    # The reference has what the package exports, a table of options comes from the registry.
    reference = (site / "interface" / "bagua.html").read_text()
    assert all(f"bagua.{name}" in reference for name in bagua.__all__)
    assert "sync_interval_ms" in (site / "algorithms" / "async_model_average.html").read_text()
    assert (site / "algorithms" / "bytegrad.html").exists()


@pytest.mark.long
def test_a_link_that_leads_nowhere_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    from links import Repository

    (tmp_path / "docs").mkdir()
    (tmp_path / "tool.py").write_text("print()\n")
    page, other = tmp_path / "docs" / "page.md", tmp_path / "README.md"
    other.write_text("# Other\n")
    page.write_text(
        "[up](../README.md#other) [file](../tool.py) [out](https://example.org)\n```\n[code](none.md)\n```\n"
    )
    site = tmp_path / "site"
    repository = Repository(tmp_path, {"guide/page": page, "index": other}, site)
    lines = repository.moved("guide/page", page).splitlines()
    assert lines[0] == "[up](../index.md#other) [file](../files/tool.py) [out](https://example.org)"
    assert lines[2] == "[code](none.md)"
    assert (site / "files" / "tool.py").exists()
    page.write_text("[nothing](none.md)\n")
    with pytest.raises(SystemExit, match=r"none\.md does not exist"):
        repository.moved("guide/page", page)
