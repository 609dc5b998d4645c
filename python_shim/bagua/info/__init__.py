# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.info`: what is installed and built, what carries data, and what is missing with the remedy.

Under torchrun also which ranks share a host, where hosts differ, and whether they reach each other.
"""
