# SPDX-License-Identifier: Apache-2.0
"""Where the original Bagua has the class of its communicators, for scripts that name it in a type or a check."""

from bagua.torch_api.communication import Communicator as BaguaSingleCommunicatorPy

__all__ = ["BaguaSingleCommunicatorPy"]
