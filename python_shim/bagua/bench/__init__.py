# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.bench`: times collectives and algorithms over a range of sizes, as nccl-tests does for NCCL."""
