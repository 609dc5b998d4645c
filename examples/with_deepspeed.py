# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO over backend "bagua", in full precision; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_deepspeed.py --stage 2
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=2, choices=[0, 1, 2, 3])
stage = parser.parse_args().stage

deepspeed.init_distributed(dist_backend="bagua")  # bagua

torch.manual_seed(0)  # the same weights on all ranks
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
config = {
    "train_micro_batch_size_per_gpu": 32,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": stage},
}
engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=config)

torch.manual_seed(dist.get_rank())  # other data on each
for step in range(100):
    images = torch.randn(32, 64)
    labels = images[:, :10].argmax(dim=1)
    loss = cross_entropy(engine(images), labels)
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and step % 33 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(f"ZeRO stage {engine.zero_optimization_stage()} over {dist.get_backend()}")
dist.destroy_process_group()
