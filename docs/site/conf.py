# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the documentation site; build.py assembles the sources."""

from __future__ import annotations

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
pygments_style = "friendly"
pygments_dark_style = "monokai"
