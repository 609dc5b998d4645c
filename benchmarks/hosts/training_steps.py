# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark: times steps of DistributedDataParallel under each way to communicate, in turn.

Started by run.py on every emulated host: training_steps.py MODEL HOSTS SECONDS WAY... Rank 0 prints a line of JSON per
way: all times in seconds, and the bytes that one rank sends to other hosts in a step. Every way is given about SECONDS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import MODELS, Contender, measure

MOST_STEPS = 6
# Bytes of a parameter as these send it, twice (n - 1) / n times; the others count for themselves.
STOCK_BYTES = {"gloo": 4, "gloo, Adam": 4, "gloo, fp16 hook": 2, "gloo, bf16 hook": 2}


# And those of torch's PowerSGD, by the rank of its factors.
STOCK_RANKS = {"gloo, PowerSGD hook, rank 1": 1, "gloo, PowerSGD hook, rank 4": 4}


def elements_of_factors(contender: Contender, rank: int) -> int:
    """Return what torch's PowerSGD hook sends of a model: factors, and gradients that those are hardly smaller than."""
    elements = 0
    for parameter in contender.ddp.parameters():
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        factors = (rows + columns) * min(rows, columns, rank)
        elements += factors if 2 * factors < parameter.numel() else parameter.numel()
    return elements


def bytes_per_step(contender: Contender, hosts: int) -> float:
    """Return what one rank sends to other hosts."""
    share = 2 * (hosts - 1) / hosts / (dist.get_world_size() / hosts)
    if contender.name in STOCK_BYTES:
        return share * contender.parameters * STOCK_BYTES[contender.name]
    if contender.name in STOCK_RANKS:
        return share * 4 * elements_of_factors(contender, STOCK_RANKS[contender.name])
    return contender.counted_bytes / len(contender.steps)


def main() -> None:
    model, hosts, seconds, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    for contender in measure(names, "gloo", MODELS[model], float(seconds), MOST_STEPS):
        if dist.get_rank() == 0:
            result = {
                "way": contender.name,
                "times": contender.times,
                "bytes_between_hosts": bytes_per_step(contender, int(hosts)),
                "optimizer_times": [step.optimizer for step in contender.steps],
                "ready": [step.buckets for step in contender.steps if step.buckets],
            }
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
