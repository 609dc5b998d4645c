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


def bytes_per_step(contender: Contender, hosts: int) -> float:
    """Return what one rank sends to other hosts."""
    if contender.name in STOCK_BYTES:
        ranks_of_host = dist.get_world_size() / hosts
        return 2 * (hosts - 1) / hosts * contender.parameters * STOCK_BYTES[contender.name] / ranks_of_host
    return contender.counted_bytes / len(contender.steps)


def main() -> None:
    """Measure the ways named on the command line."""
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
