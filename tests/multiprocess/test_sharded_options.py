# SPDX-License-Identifier: Apache-2.0
"""What codes the gradients of a sharded model, which travel in parts on a line: start_step, guard, what is refused."""

from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._torch_private import comm_of_fsdp, fsdp_groups
from ranks import on_ranks
from reference import named
from sharded_models import (
    MESHES,
    check_equal,
    compressed,
    local,
    loss_of,
    made_model,
    mesh_of,
    on_hosts,
    sharded,
    trained,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.tensor import Shard, distribute_tensor

on_two_meshes = pytest.mark.parametrize("mesh_name", ["hybrid", "line"])


@on_two_meshes
@on_ranks(4)
def test_before_the_start_step_gradients_are_exact(mesh_name: str) -> None:
    mesh, model = mesh_of(mesh_name), made_model()
    expected = trained(sharded(model, mesh), rate=0)
    own = trained(compressed(sharded(model, mesh), "4bit", start_step=2), rate=0)
    for number, (step, others) in enumerate(zip(own.gradients, expected.gradients, strict=True)):
        are_exact = all(torch.allclose(step[name], others[name], rtol=1e-5, atol=1e-6) for name in others)
        assert are_exact == (number < 2), number


@on_ranks(4)
def test_whether_2_bits_have_error_feedback_goes_by_the_optimizer() -> None:
    for make, keeps in ((torch.optim.SGD, True), (torch.optim.AdamW, False)):
        ours = sharded(made_model(), mesh_of())
        handle = bagua.fsdp.compress(ours, "2bit", exact=(), optimizer=make(ours.parameters(), lr=1e-3))
        trained(ours, range(1))
        assert (handle.stats()["state_bytes"] > 0) == keeps
    optimizer, other = torch.optim.SGD(ours.parameters()), sharded(made_model(), mesh_of())
    with pytest.raises(ValueError, match="does not hold 12"):
        bagua.fsdp.compress(other, "2bit", optimizer=optimizer)


class Given(nn.Module):
    """Its gradients are the tensors that forward() is given."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.zeros(256, 64))
        self.uneven = nn.Parameter(torch.zeros(256, 64))

    def forward(self, even: torch.Tensor, uneven: torch.Tensor) -> torch.Tensor:
        return (self.even * even).sum() + (self.uneven * uneven).sum()


def with_outliers(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    even, uneven = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    uneven.view(-1)[rank::64] *= 1000
    return even, uneven


@pytest.mark.parametrize("mesh_name", ["line", "line of hosts"])
@on_ranks(4)
def test_a_gradient_that_its_codec_does_not_suit_is_coded_finer_in_all_parts(mesh_name: str) -> None:
    mesh = mesh_of(mesh_name)
    model: Any = fully_shard(Given(), mesh=mesh)
    handle = bagua.fsdp.compress(model, "int8", error_feedback=True, guard="adapt")
    shards = mesh["shard"]
    for step in range(4):
        model.zero_grad()
        model(*with_outliers(step, dist.get_rank())).backward()
        mean = torch.stack([with_outliers(step, rank)[1] for rank in range(4)]).mean(0)
        own = mean.chunk(shards.size())[shards.get_local_rank()]
        off = (local(model.uneven.grad) - own).abs().median()
        # The first two steps are looked at: what they find holds from the third on.
        assert (off > 0.2) if step < 2 else (off < 1e-5), (step, off)
    assert handle.stats()["guard"]["raised"] == {"uneven": 1}
    # Nobody has the whole mean.
    assert handle.stats()["guard"]["error_of_mean"] == 0
    # Part after part.
    assert {int(name.split(".")[2]) % 2 for name in handle.state_dict()["state"]} == {0}


# --- what bagua.fsdp.compress refuses ---


@on_two_meshes
@on_ranks(4)
def test_what_only_a_backward_shows_is_refused_there(mesh_name: str) -> None:
    mesh = mesh_of(mesh_name)
    part = sharded(made_model(), mesh)
    bagua.fsdp.compress(part.blocks[0], "int8")
    with pytest.raises(ValueError, match="outermost module"):
        loss_of(part, 0).backward()
    hooked = compressed(sharded(made_model(), mesh))
    hooked.set_all_reduce_hook(lambda _: None)
    with pytest.raises(ValueError, match="set_all_reduce_hook"):
        loss_of(hooked, 0).backward()
    traced = compressed(sharded(made_model(), mesh))
    loss = loss_of(traced, 0)
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(ValueError, match="compiled_autograd"):
        loss.backward()


@pytest.mark.parametrize("which", ["all_gather", "reduce_scatter"])
@on_ranks(4)
def test_communication_that_was_set_afterwards_is_refused_and_stays_after_remove(which: str) -> None:
    ours = sharded(made_model(), mesh_of("line"))
    handle = bagua.fsdp.compress(ours, "gradient_allreduce", weights="cache")
    trained(ours, range(1))
    own = {"all_gather": collectives.DefaultAllGather, "reduce_scatter": collectives.DefaultReduceScatter}[which]()
    loss = loss_of(ours, 0)
    getattr(ours.blocks[0], f"set_custom_{which}")(own)
    with pytest.raises(ValueError, match=rf"set_custom_{which}\(\): call handle.remove\(\)"):
        loss.backward()
    with pytest.raises(ValueError, match=rf"set_custom_{which}\(\): call handle.remove\(\)"):
        loss_of(ours, 0)
    handle.remove()
    [group] = fsdp_groups(ours.blocks[0])
    assert comm_of_fsdp(group, which) is own


@on_two_meshes
@on_ranks(4)
def test_a_first_forward_in_inference_mode_is_refused_with_a_remedy(mesh_name: str) -> None:
    mesh, model = mesh_of(mesh_name), made_model()
    stock, ours = sharded(model, mesh), sharded(model, mesh)
    exact: dict[str, Any] = {"gradients": "gradient_allreduce", "weights": "cache" if mesh_name == "line" else None}
    handle = bagua.fsdp.compress(ours, **exact)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch.no_grad\(\), .*inference_mode=False"):
        loss_of(ours, 0)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours, 0), loss_of(stock, 0))
    for _ in range(2):
        check_equal(trained(ours), trained(stock))
        # The first to gather is an evaluation.
        handle.remove()
        handle = bagua.fsdp.compress(ours, **exact)
        with torch.inference_mode():
            torch.testing.assert_close(loss_of(ours, 0), loss_of(stock, 0))


@on_ranks(4)
def test_what_cannot_be_done_right_is_refused_with_its_name() -> None:
    mesh, model = mesh_of(), made_model()
    line = init_device_mesh("cpu", (4,))
    simple = nn.Linear(4, 4)
    simple.weight = nn.Parameter(distribute_tensor(simple.weight.detach(), line, [Shard(0)]))
    mixed = made_model()
    fully_shard(mixed.blocks[0], mesh=line)
    frozen = made_model().requires_grad_(False)
    of_fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), mesh.get_group("shard"), device_id=torch.device("cpu"))
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (model, "fully_shard", {}),
        (nn.parallel.DistributedDataParallel(model), "register_comm_hook", {}),
        (of_fsdp1, "FSDP1", {}),
        (simple, "SimpleFSDP", {}),
        (fully_shard(mixed, mesh=mesh), "different meshes", {}),
        (sharded(model, line), "cannot reduce-scatter", {"gradients": "powersgd"}),
        (sharded(frozen, mesh), "frozen", {}),
        (sharded(model, mesh), "weights=", {"weights": "cache"}),
        (sharded(model, mesh), "expected a codec", {"gradients": "int9"}),
        (sharded(model, mesh), "takes no codec", {"algorithm": "gradient_allreduce"}),
        (sharded(model, mesh), "optimizer", {"gradients": "decentralized"}),
        (sharded(model, mesh), "average", {"average": False}),
        (sharded(model, mesh), "nonsense", {"nonsense": 1}),
        (sharded(model, mesh), "did you mean 'optimizer'", {"optimiser": 1}),
        (sharded(model, mesh), "dimension of the mesh", {"process_group": mesh.get_group("replicate")}),
        (sharded(model, mesh), "two codecs", {"codec": "4bit"}),
        (sharded(model, mesh), "two codecs", {"algorithm": "diloco", "codec": "4bit"}),
    ]
    for given, words, options in cases:
        with named(words), pytest.raises(ValueError, match=words):
            bagua.fsdp.compress(given, **options)
    with pytest.raises(TypeError, match=r"optimizer must be .*: pass the optimizer itself"):
        bagua.fsdp.compress(sharded(model, mesh), optimizer="sgd")
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(ValueError, match="compiled_autograd"):
        bagua.fsdp.compress(sharded(model, mesh))


@on_ranks(4)
def test_hosts_and_ranks_of_a_host_that_ask_for_different_codecs_are_all_told() -> None:
    ours = sharded(made_model(), mesh_of())
    # A host, a rank on each of them, and one alone, of which the ranks of its host are told by their own group.
    for odd, told in (((2, 3), "other options"), ((1, 3), "other options"), ((2,), "other options|could not register")):
        with named(odd), pytest.raises(ValueError, match=told):
            bagua.fsdp.compress(ours, "4bit" if dist.get_rank() in odd else "int8")
    for odd, told in (((2, 3), "rank 1 could not"), ((3,), "could not register")):
        is_odd = dist.get_rank() in odd
        with named(odd), pytest.raises(ValueError, match="expected a codec" if is_odd else told):
            bagua.fsdp.compress(ours, "no codec" if is_odd else "int8")


class Adapted(nn.Module):
    """A frozen layer with an adapter, whose matrices have 2048 elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False))])
        self.frozen = nn.Linear(256, 256).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x) + self.blocks[0](x)
        return result


@pytest.mark.parametrize("mesh_name", MESHES)
@on_ranks(4)
def test_shards_are_small_where_their_whole_parameters_are(mesh_name: str) -> None:
    model = sharded(Adapted(), mesh_of(mesh_name))
    with on_hosts(mesh_name):
        handle = bagua.fsdp.compress(model, "int8", guard=None)
    model(torch.randn(4, 256)).square().sum().backward()
    stats = handle.stats()
    # Without a codec half of the bytes or more, as each of two hosts sends what it has.
    assert 0 < stats["wire_bytes_between_hosts"] < 0.3 * stats["logical_bytes"]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15 has no manual finalization"
)
@on_ranks(4)
def test_gradients_reduced_after_the_backward_are_refused() -> None:
    ours: Any = compressed(sharded(made_model(), mesh_of()))
    ours.set_manual_backward_finalization(True)
    loss_of(ours, 0).backward()
    with pytest.raises(ValueError, match="set_manual_backward_finalization"):
        ours.finalize_backward()
