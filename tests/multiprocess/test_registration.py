# SPDX-License-Identifier: Apache-2.0
"""Registering backend and hooks: without an import, wrongly, twice."""

from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, loss_of, new_group, perceptron, random_gradient, same, train, with_hook
from ranks import on_new_ranks, on_ranks
from script_ranks import run_script
from torch.nn.parallel import DistributedDataParallel as DDP


@on_ranks(2)
def test_a_second_hook_raises() -> None:
    ddp = DDP(perceptron())
    bagua.register_comm_hook(ddp, "bytegrad")
    with pytest.raises(RuntimeError, match="already has a communication hook"):
        bagua.register_comm_hook(ddp, "gradient_allreduce")
    with pytest.raises(RuntimeError, match=r"once|already"):
        ddp.register_comm_hook(*bagua.comm_hook("bytegrad"))
    other = DDP(perceptron())
    other.register_comm_hook(*bagua.comm_hook("bytegrad"))
    with pytest.raises(RuntimeError, match="already has a communication hook"):
        bagua.register_comm_hook(other, "bytegrad")
    for model in (ddp, other):
        loss_of(model, 0).backward()


@on_new_ranks(1)
def test_the_python_reducer_raises() -> None:
    # Ranks of its own: the reducer changes settings of torch for good.
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = DDP(perceptron())
    with pytest.raises(RuntimeError, match="python_reducer"):
        bagua.register_comm_hook(ddp, "bytegrad")


@on_ranks(3)
def test_ranks_whose_models_differ_raise_everywhere() -> None:
    rank, last = dist.get_rank(), 2
    # A group per rank: DDP itself would notice different models.
    alone = [dist.new_group([r]) for r in range(3)][rank]
    ddp = DDP(Leaves(5, 3 if rank == last else 4), process_group=alone)
    with pytest.raises(ValueError, match=f"rank {last} registered") as error:
        bagua.register_comm_hook(ddp, "bytegrad", process_group=dist.group.WORLD)
    assert f"rank {rank} has" in str(error.value)
    # Nothing was registered: the right call still works.
    same_model = DDP(Leaves(5, 4))
    bagua.register_comm_hook(same_model, "bytegrad")
    same_model([torch.ones(5), torch.ones(4)]).backward()
    dist.destroy_process_group(alone)


@on_ranks(4)
def test_a_hook_may_have_another_group_than_the_model() -> None:
    rank = dist.get_rank()
    half = [0, 1] if rank < 2 else [2, 3]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DDP(Leaves(97))
    bagua.register_comm_hook(ddp, "gradient_allreduce", process_group=halves[rank // 2])
    ddp([random_gradient(97, rank)]).backward()
    expected = (random_gradient(97, half[0]) + random_gradient(97, half[1])) / 2
    assert torch.equal(ddp.module.leaves[0].grad, expected)
    dist.destroy_process_group(halves[rank // 2])


@on_new_ranks(2)
def test_a_hook_may_be_made_before_the_process_group(tmp_path: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    hook = bagua.comm_hook("bytegrad", hierarchical=False)
    with pytest.raises(TypeError, match=r"bagua\.Options, got"):
        dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1, pg_options=object())
    assert not dist.is_initialized()
    dist.init_process_group("bagua", store=dist.FileStore(str(tmp_path / "store"), size), rank=rank, world_size=size)
    lazily = train(perceptron(), lambda ddp: ddp.register_comm_hook(*hook))
    assert hook[0].stats()["steps"] == 3
    assert same(lazily, train(perceptron(), with_hook("bytegrad", hierarchical=False)))


@on_ranks(2)
def test_group_options_are_carried_to_new_groups() -> None:
    for wrong in (object(), {"timeout": 3}):
        with pytest.raises(TypeError, match=r"bagua\.Options, got"):
            dist.new_group(pg_options=wrong)
    options = bagua.Options(is_high_priority_stream=True)
    cpu = torch.device("cpu")
    with new_group(pg_options=options, timeout=timedelta(seconds=17)) as group:
        own = group._get_backend(cpu).options
        with new_group(pg_options=options, timeout=timedelta(seconds=19)):
            assert own.is_high_priority_stream
            assert own._timeout == timedelta(seconds=17)
        assert own.global_ranks_in_group == list(range(dist.get_world_size()))
    with new_group() as group:
        assert not group._get_backend(cpu).options.is_high_priority_stream
    assert options.is_high_priority_stream
    dist.barrier()


_WITHOUT_IMPORT = """
import os, sys, time
print(*[name for name in sys.modules if name.split(".")[0] in ("bagua", "bagua_autoload")])
sys.modules.pop("bagua_autoload", None)
# What it computes, however long others keep it from that.
begin = time.thread_time()
import bagua_autoload
bagua_autoload.register_at_import()
print(time.thread_time() - begin)

import torch
import torch.distributed as dist

dist.init_process_group(backend="bagua", init_method="file://" + os.environ["STORE"],
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
assert dist.get_backend() == "bagua", dist.get_backend()
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
print("sum", tensor.tolist())
dist.destroy_process_group()
"""


def test_a_script_that_never_imports_bagua(tmp_path: Path) -> None:
    if not [*distributions(name="bagua")]:
        pytest.skip("the distribution 'bagua' is not installed: torch finds its entry points after `make setup`")
    for end in run_script(_WITHOUT_IMPORT, 2, tmp_path, fresh=["torch"]):
        loaded, seconds, result = end.output.splitlines()
        assert set(loaded.split()) <= {"bagua_autoload"}, "import torch loads only what registers"
        assert float(seconds) < 0.1  # torch itself takes more than a second
        assert result == "sum [3.0, 3.0, 3.0]"


_DEVICES = """
import os
import torch
import torch.distributed as dist

def devices_of_a_group() -> str:
    dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
    config, types = dist.get_backend_config(), sorted(str(device) for device in dist.group.WORLD._device_types)
    dist.destroy_process_group()
    return f"{config} {types}"

print(devices_of_a_group())
print("started", torch.cuda.is_initialized())
child = os.fork()
if child == 0:
    # Had CUDA been started, or been asked in earnest whether it can be, it would be of no use here.
    print("spoilt", torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(child, 0)

# Found out when a group is made: as if there were a GPU, visible from now on.
del os.environ["CUDA_VISIBLE_DEVICES"]
torch.cuda._raw_device_count_nvml = lambda: 1
print(devices_of_a_group())
"""


def test_a_group_serves_the_devices_that_there_are(tmp_path: Path) -> None:
    lines = run_script(_DEVICES, 1, tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})[0].output.splitlines()
    assert lines[:3] == ["cpu:bagua ['cpu']", "started False", "spoilt False"]
    if torch.backends.cuda.is_built():
        assert lines[3] == "cpu:bagua,cuda:bagua ['cpu', 'cuda']"
