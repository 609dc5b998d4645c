# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua`: names the command lines."""

print("python -m bagua.info         what is installed, carries data, and what is missing; under torchrun of all ranks")
print("python -m bagua.elastic      serves a store in which the members of a training meet, who may come and go")
print("python -m bagua.bench        times collectives and training steps over an emulated or a real network")
print("python -m bagua.bench plan   predicts a step of your model with every algorithm on your line")
