# SPDX-License-Identifier: Apache-2.0
"""One rank of accuracy.py: trains the network of the demo in one way and notes when which accuracy was reached.

training_accuracy.py WAY EPOCHS. Rank 0 prints a line of JSON. The seconds are those of training, without evaluation.
"""

# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

import json
import sys
import time
from pathlib import Path

import bagua
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from contenders import ways
from fashion_mnist import DATA, evaluate, load, mirror_half, residual_network

BATCH = 256
LOOKS_PER_EPOCH = 3


def main() -> None:
    """Train."""
    way, epochs = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    chosen = ways("gloo")[way]
    dist.init_process_group(chosen.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load(DATA, torch.device("cpu"))
    torch.manual_seed(0)
    network = residual_network()
    model = DistributedDataParallel(network)
    highest = 0.006 if chosen.optimizer == "QAdam" else 0.2
    optimizer: torch.optim.Optimizer
    if chosen.optimizer == "QAdam":
        optimizer = bagua.QAdamOptimizer(network.parameters(), lr=highest, warmup_steps=50)
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=highest, momentum=0.9, weight_decay=5e-4, nesterov=True)
    chosen.register(model, optimizer)
    shuffle = torch.Generator().manual_seed(0)
    torch.manual_seed(rank)
    steps = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, total_steps=epochs * steps, pct_start=0.25, cycle_momentum=False
    )
    seconds: list[float] = []
    accuracies: list[float] = []
    trained = 0.0
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=shuffle)[rank::ranks]
        for chosen in torch.stack(order.split(BATCH // ranks)[:steps]).tensor_split(LOOKS_PER_EPOCH):
            dist.barrier()
            begin = time.perf_counter()
            for batch in chosen:
                loss = cross_entropy(model(mirror_half(images[batch])), labels[batch], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            trained += time.perf_counter() - begin
            seconds.append(trained)
            accuracies.append(evaluate(model, test_images, test_labels))
    if rank == 0:
        print(json.dumps({"way": way, "seconds": seconds, "accuracies": accuracies}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
