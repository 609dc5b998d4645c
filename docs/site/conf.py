# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the documentation site; build.py assembles the sources."""

from __future__ import annotations

from typing import Any

import bagua

project = "bagua"
author = "the authors of bagua"
project_copyright = author
release = version = bagua.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["files"]
myst_heading_anchors = 4

# Docstrings use single backquotes for code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"bagua {release.partition('+')[0]}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
# Blocks without a language are what a program prints.
highlight_language = "text"

# Classes whose instances the package makes: their constructors are not for users.
_MADE_BY_THE_PACKAGE = {
    "bagua.Handle",
    "bagua.torch_api.communication.BaguaProcessGroup",
    "bagua.torch_api.communication.CommMember",
    "bagua.torch_api.communication.Communicator",
    "bagua.torch_api.communication.ReduceOp",
}


def _without_constructor(app: Any, kind: str, name: str, *rest: Any) -> tuple[str, str] | None:
    return ("", "") if kind == "class" and name in _MADE_BY_THE_PACKAGE else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _without_constructor)
