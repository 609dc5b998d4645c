# SPDX-License-Identifier: Apache-2.0
"""What the troubleshooting page explains."""

from pathlib import Path

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text().split())


def is_explained(error: BaseException) -> bool:
    """Whether the page quotes how the error begins."""
    text = str(error).replace("`", "")
    return any(text.startswith(quote) for quote in PAGE.split("`") if len(quote) > 30)
