# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark of rounds: times every step, with diloco and without communication, in turns.

Started by rounds.py on every emulated host: training_rounds.py MODEL TURNS STEPS OPTIONS, with the options as JSON.
Nothing waits for anybody between the steps, as in training. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import bagua
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import MODELS

SETTLING_STEPS = 5
STEPS_OF_GLOO = 3


class Training:
    def __init__(self, model: str, group: dist.ProcessGroup | None = None, *, is_local: bool = False) -> None:
        torch.manual_seed(1)
        network, self._input = MODELS[model]()
        self.parameters = sum(p.numel() for p in network.parameters())
        self.ddp = DistributedDataParallel(network, process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-6)
        self._is_local = is_local

    def step(self) -> float:
        x = self._input()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        if self._is_local:
            with self.ddp.no_sync():
                self.ddp(x).square().mean().backward()
        else:
            self.ddp(x).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def main() -> None:
    model, turns, steps, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    gloo = Training(model, dist.new_group(backend="gloo"))
    local, rounds = Training(model, is_local=True), Training(model)
    handle = bagua.register_comm_hook(rounds.ddp, "diloco", optimizer=rounds.optimizer, **options)
    gloo_times = [gloo.step() for _ in range(STEPS_OF_GLOO + 2)][2:]
    # The handle counts from the first step: a turn ends where nothing is on its way.
    times: dict[str, list[float]] = {"local": [], "rounds": []}
    for turn in range(turns):
        for name, training in (("local", local), ("rounds", rounds)):
            dist.barrier()
            own = [training.step() for _ in range(steps)]
            times[name] += own[SETTLING_STEPS:] if turn == 0 else own
    stats: dict[str, Any] = handle.stats()
    handle.remove()
    if dist.get_rank() == 0:
        result = {"parameters": rounds.parameters, "gloo": gloo_times, **times}
        result |= {"sent": stats["wire_bytes"], "memory": stats["memory"], "seconds": stats["seconds"]}
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
