# SPDX-License-Identifier: Apache-2.0
"""Key-value stores below `CacheLoader`."""
