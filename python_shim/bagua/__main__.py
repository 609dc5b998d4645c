# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua`: names the command lines."""

print("python -m bagua.info    what is installed, what carries data, and what is missing; under torchrun for all ranks")
print("python -m bagua.bench   times collectives and training steps over an emulated or a real network")
