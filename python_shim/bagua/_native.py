# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ parts, after making sure that they fit the torch at hand, and registers the backend."""

import bagua_autoload

from bagua._version_check import check_torch

check_torch()

from bagua import _C  # noqa: E402  after the check, which explains what would be a missing symbol here

Options = _C.Options
# torch calls this where it finds entry points; a source tree that was not installed has none.
bagua_autoload.register()
