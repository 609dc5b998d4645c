# SPDX-License-Identifier: Apache-2.0
"""All checks, by name; importing a module of them registers them."""

import checks_codecs  # noqa: F401
import checks_ddp  # noqa: F401
import checks_failures  # noqa: F401
import checks_fsdp  # noqa: F401
import checks_graphs  # noqa: F401
import checks_hooks  # noqa: F401
import checks_streams  # noqa: F401
import checks_traces  # noqa: F401
import checks_transport  # noqa: F401
from check import CHECKS

__all__ = ["CHECKS"]
