# SPDX-License-Identifier: Apache-2.0
"""One rank of time_to_loss.py: trains the dictionary of `make convergence`, and notes when the loss was how high.

training_loss.py CONTENDER STEPS FOLDER SEED. Rank 0 prints a line of JSON. The seconds are those of training; what is
judged at the end takes none.
"""

# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import bagua
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "convergence"))
import training
from plan import FEW_ROUNDS, diloco, few_bits, local_sgd, low_rank
from runs import DICTIONARY, TORCHS_POWER_SGD, Row, Run, baseline

FRAGMENTS = diloco("AdamW", 100, "4bit", 4, FEW_ROUNDS)
CONTENDERS: dict[str, Row] = {
    "gloo": baseline("AdamW"),
    f"gloo, {TORCHS_POWER_SGD}, rank 4": Row("", "AdamW", TORCHS_POWER_SGD, {"rank": 4, "start_step": 40}),
    "gradient_allreduce": Row("", "AdamW", "gradient_allreduce"),
    "bytegrad": Row("", "AdamW", "bytegrad"),
    "low_precision_decentralized": Row("", "AdamW", "low_precision_decentralized"),
    "async": Row("", "AdamW", "async", {"sync_interval_ms": 5}),
    "quantized_allreduce, 4bit": few_bits("AdamW")[0],
    "powersgd, rank 4": low_rank("AdamW", DICTIONARY, (4,))[0],
    "local_sgd, 30 steps": local_sgd("AdamW", 30),
    "diloco, 30 steps, 4bit": diloco("AdamW", 30, "4bit", outer=FEW_ROUNDS),
    # Its exchanges are beside five steps.
    "diloco, 100 steps, 4 fragments, 4bit": replace(FRAGMENTS, options={**FRAGMENTS.options, "delay": 5}),
}


class TimedRecord(training.Record):
    """With the time at which each step had ended, in seconds since the first began."""

    def __init__(self, run: Run, model: DistributedDataParallel, handle: bagua.Handle | None) -> None:
        super().__init__(run, model, handle)
        self.ends: list[float] = []
        dist.barrier()
        self._begin = time.perf_counter()

    def after_step(self, loss: Tensor) -> None:
        super().after_step(loss)
        self.ends.append(self.elapsed())

    def elapsed(self) -> float:
        return time.perf_counter() - self._begin


def train(name: str, run: Run) -> dict[str, object]:
    """Return when which training loss was reached, and the loss on what is held out."""
    torch.manual_seed(run.seed)
    network: nn.Module = run.task.network()
    model = DistributedDataParallel(network)
    optimizer = training.make_optimizer(run, model)
    handle = training.register(run, model, optimizer)
    record = TimedRecord(run, model, handle)
    training.train(run, model, optimizer, record)
    training.end_rounds(run, handle)
    seconds = record.elapsed()
    losses = record.mean_losses()
    training.average_over_ranks(network)
    return {
        "contender": name,
        "seed": run.seed,
        "seconds": seconds,
        "ends": record.ends[training.BATCH_OF_LOSSES - 1 :: training.BATCH_OF_LOSSES],
        "losses": losses,
        "validation_loss": training.judge(run, network)[0],
    }


def main() -> None:
    name, steps, folder, seed = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    task = replace(DICTIONARY, length=steps)
    task.load(folder)
    row = CONTENDERS[name]
    dist.init_process_group("gloo" if row.algorithm in (None, TORCHS_POWER_SGD) else "bagua")
    result = train(name, Run(task, dist.get_world_size(), row, seed))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
