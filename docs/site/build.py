# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site: python docs/site/build.py OUTPUT. `make docs` calls this.

The pages are the Markdown files that lie in the repository anyway, each fact where it belongs; here they are brought
together in one tree, with links between them that hold there, and a reference of the Python interface is added. What
would be a warning (a link that leads nowhere, a docstring that cannot be read) ends the build.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from interface import interface_pages, options_table
from links import Repository
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

GUIDE = [
    "why",
    "install",
    "quick_start",
    "lightning",
    "algorithms",
    "rounds",
    "compressed",
    "sharded",
    "several_machines",
    "members",
    "gpu",
    "nccl_net",
    "measuring",
    "troubleshooting",
]
REFERENCE = ["settings", "migration", "torch_api"]
# Whatever else lies in docs/ comes between these and the pages for developers.
DEVELOPERS = {
    "architecture": "docs/architecture.md",
    "contributing": "CONTRIBUTING.md",
    "changes": "CHANGELOG.md",
    "developers/algorithms": "algorithms/README.md",
    "developers/compressed": "algorithms/shared/compressed/README.md",
    "developers/backend": "backend/README.md",
    "developers/nccl": "backend/cuda/README.md",
    "developers/kernels": "kernels/README.md",
    "developers/kernel_benchmarks": "benchmarks/kernels/README.md",
    "developers/gpu_benchmarks": "benchmarks/gpu/README.md",
    "developers/measurements": "benchmarks/LOG.md",
    "developers/convergence_runs": "benchmarks/convergence/RESULTS.md",
    "developers/predictions": "benchmarks/results/prediction.md",
    "developers/tests": "tests/README.md",
}


def pages() -> dict[str, Path]:
    """Return page of the site -> file of the repository."""
    found = {name: ROOT / "docs" / f"{name}.md" for name in [*GUIDE, *REFERENCE]}
    found["index"] = ROOT / "README.md"
    found["examples"] = ROOT / "examples" / "README.md"
    for readme in sorted(ROOT.glob("algorithms/*/README.md")):
        if readme.relative_to(ROOT).as_posix() not in DEVELOPERS.values():
            found[f"algorithms/{readme.parent.name}"] = readme
    found |= {name: ROOT / path for name, path in DEVELOPERS.items()}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path not in found.values():
            found[path.stem] = path
    return found


def toctree(caption: str, names: list[str]) -> str:
    """Return a section of the site's table of contents."""
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])


def contents(found: dict[str, Path]) -> str:
    """Return the site's table of contents, for the first page."""
    algorithms = [name for name in found if name.startswith("algorithms/")]
    known = {*GUIDE, *REFERENCE, *DEVELOPERS, *algorithms, "index", "examples"}
    sections = {
        "Guide": [*GUIDE, "examples"],
        "Algorithms": algorithms,
        "Figures and promises": [name for name in found if name not in known],
        "Reference": [*REFERENCE, "interface/index"],
        "For developers": list(DEVELOPERS),
    }
    return "\n\n".join(toctree(caption, names) for caption, names in sections.items() if names)


def assemble(folder: Path) -> None:
    """Write the sources of the site."""
    found = pages()
    repository = Repository(ROOT, found, folder)
    for name, path in found.items():
        text = repository.moved(name, path)
        if name == "index":
            text += "\n" + contents(found) + "\n"
        if name.startswith("algorithms/"):
            text += "\n" + options_table(text.partition("\n")[0].removeprefix("# ").strip()) + "\n"
        target = folder / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for name, text in interface_pages().items():
        target = folder / "interface" / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def main() -> int:
    """Build; the exit status is 0 where there was nothing to complain about."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="bagua-docs-") as folder:
        sources = Path(folder, "sources")
        sources.mkdir()
        assemble(sources)
        strict = ["-W", "--keep-going", "-q", "-b", "html"]
        return sphinx([*strict, "-c", str(HERE), "-d", str(Path(folder, "trees")), str(sources), str(output)])


if __name__ == "__main__":
    sys.exit(main())
