# SPDX-License-Identifier: Apache-2.0
"""Errors with a class of their own. All others are the usual ValueError, TypeError and RuntimeError."""


class RepeatedInitializationError(RuntimeError):
    """`init_process_group` was called a second time. Up to version 0.6 of the original, later a plain RuntimeError."""
