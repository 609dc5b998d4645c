# SPDX-License-Identifier: Apache-2.0
"""Where an editor finds the options of each algorithm: in this module's stub, which scripts/typed_options.py writes."""

from bagua._hooks import comm_hook as comm_hook
from bagua._hooks import register_comm_hook as register_comm_hook
