# SPDX-License-Identifier: Apache-2.0
"""A process that a rank forks, and that ends as processes do, leaves the rank's groups alone."""

from pathlib import Path

import pytest
from script_ranks import run_script

# A data loader that forks, a helper that comes back from fork(): the child runs all that Python does at its end.
FORKING = """
import gc, os, sys, time
from datetime import timedelta
import bagua, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
ddp(torch.ones(1, 3)).sum().backward()
group = dist.new_group()
dist.all_reduce(torch.ones(4), group=group)

def child(what):
    if what == "use":
        for call in (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.send(torch.ones(1), 1 - rank)):
            try:
                call()
            except RuntimeError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("a child is no rank")
    elif what == "destroy":
        dist.destroy_process_group(group)
    elif what == "drop":
        globals().pop("ddp")
        gc.collect()
    sys.exit(3)

children = {}
for what in ("end", "use", "destroy", "drop"):
    process = os.fork()
    if process == 0:
        child(what)
    children[process] = what
# The parent's group is at work meanwhile.
for _ in range(20):
    dist.all_reduce(torch.ones(4))
limit = time.monotonic() + 60
while children and time.monotonic() < limit:
    process, status = os.waitpid(-1, os.WNOHANG)
    if process:
        assert os.waitstatus_to_exitcode(status) == 3, (children[process], status)
        del children[process]
    time.sleep(0.02)
for process in children:
    os.kill(process, 9)
assert not children, children
dist.barrier()
ddp(torch.ones(1, 3)).sum().backward()
ones = torch.ones(4)
dist.all_reduce(ones, group=group)
dist.destroy_process_group()
print("sum", ones.tolist())
"""


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_forked_child_that_ends_leaves_the_groups_of_its_parent_alone(hosts: str, tmp_path: Path) -> None:
    for end in run_script(FORKING, 2, tmp_path, env={"BAGUA_HOST_ID": list(hosts)}):
        assert end.output.endswith("sum [2.0, 2.0, 2.0, 2.0]\n"), end.output
