# SPDX-License-Identifier: Apache-2.0
"""A model that fully_shard shards on a mesh of two emulated hosts, and its trainings. Used inside ranks."""

import copy
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import bagua
import torch
import torch.distributed as dist
from devices import randn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# Of every odd size: no dimension is a multiple of two, one has fewer rows than there are shards.
WIDTHS = (67, 131, 97, 7)


class Block(nn.Module):
    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, wider)
        self.scale = nn.Parameter(torch.ones(1, wider))
        self.norm = nn.LayerNorm(wider)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(torch.tanh(self.inner(x)) * self.scale)
        return result


class Model(nn.Module):
    """Of blocks, the middle one frozen but for its norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*widths) for widths in pairwise(WIDTHS[:-1]))
        self.frozen = nn.Linear(WIDTHS[-2], WIDTHS[-2]).requires_grad_(False)
        self.head = nn.Linear(WIDTHS[-2], WIDTHS[-1])

    def forward(self, x: Tensor, skipped: int = -1, is_reentrant: bool | None = None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == skipped:
                x = x.new_ones(len(x), WIDTHS[i + 1]) * x.mean()
            elif is_reentrant is None or i == 0:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=is_reentrant)
        result: Tensor = self.head(self.frozen(x))
        return result


def made_model() -> Model:
    torch.manual_seed(5)
    return Model()


# Of four ranks: the shape of a mesh, and how many hosts they are on. Neighbours are on one.
MESHES = {"hybrid": ((2, 2), 2), "line": ((4,), 2), "line of hosts": ((4,), 4)}


def on_hosts(name: str) -> Any:
    """Groups that are made in this block have their ranks on the hosts of a mesh."""
    host = dist.get_rank() * MESHES[name][1] // dist.get_world_size()
    return mock.patch.dict(os.environ, BAGUA_HOST_ID=str(host))


def mesh_of(name: str = "hybrid") -> DeviceMesh:
    shape, _ = MESHES[name]
    with on_hosts(name):
        if len(shape) == 1:
            # A mesh of all ranks has their group, which knows of one host.
            group = dist.new_group()
            assert group is not None
            return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """A copy of the model, sharded."""
    model = copy.deepcopy(model)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model.frozen, mesh=mesh, **options)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, step: int, part: int = 0, **given: Any) -> Tensor:
    """Large, so that an error of a codec shows."""
    loss: Tensor = model(randn(6, WIDTHS[0], seed=100 * step + 10 * part + dist.get_rank()), **given).square().sum()
    return loss


def local(tensor: Any) -> Tensor:
    """This rank's shard."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach().clone()


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards, also of a model that is whole."""
    own = {}
    for name, parameter in model.named_parameters():
        chunks = parameter.detach().chunk(2) if type(parameter) is nn.Parameter else [local(parameter)] * 2
        index = dist.get_rank() % 2
        own[name] = chunks[index].clone() if index < len(chunks) else chunks[0][:0].clone()
    return own


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


POLICIES: dict[str, dict[str, Any]] = {
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "reduced in bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "reduced in float16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "kept whole": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


class Trained(NamedTuple):
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


Step = Callable[[Any, int], None]


def plain_step(model: Any, step: int) -> None:
    loss_of(model, step).backward()


def accumulated_in_whole(model: Any, step: int) -> None:
    """Gradients add up whole, and are reduced once."""
    for part in range(3):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = part == 2
        else:
            model.set_requires_gradient_sync(part == 2)
        loss_of(model, step, part).backward()


def accumulated_in_host(model: Any, step: int) -> None:
    """They are reduced inside the host every time, and between hosts once."""
    for part in range(3):
        if not isinstance(model, DistributedDataParallel):
            model.set_requires_all_reduce(part == 2)
        loss_of(model, step, part).backward()


def trained(model: Any, steps: Sequence[int] = range(3), step: Step = plain_step, rate: float = 1e-3) -> Trained:
    """The gradients of every step, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    gradients = []
    for number in steps:
        optimizer.zero_grad()
        step(model, number)
        gradients.append(gradients_of(model))
        optimizer.step()
    return Trained(gradients, {name: local(p) for name, p in model.named_parameters()})


def compressed(model: Any, gradients: str = "gradient_allreduce", **options: Any) -> Any:
    bagua.fsdp.compress(model, gradients, **options)
    return model


def in_full_precision(model: Any, mesh: DeviceMesh) -> Any:
    """With all that is exact."""
    return compressed(model, weights="cache" if mesh.ndim == 1 else None)


def check_equal(one: Trained, other: Trained, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Check gradients and weights, and that there are as many: by default to within float32 in another order."""
    for own, expected in zip([*one.gradients, one.weights], [*other.gradients, other.weights], strict=True):
        assert own.keys() == expected.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def outcome(model: Any) -> Tensor:
    """What a forward computes, the same input on all ranks."""
    with torch.no_grad():
        result: Tensor = model(torch.linspace(-1, 1, WIDTHS[0]).expand(1, -1))
    # FSDP2 leaves the root whole.
    model.reshard()
    return result


def error_of(own: Trained, expected: Trained) -> float:
    """Return the largest error of all steps, as a share of the gradient's norm."""
    errors = []
    for step, others in zip(own.gradients, expected.gradients, strict=True):
        assert step.keys() == others.keys()
        exact = torch.cat([others[name].flatten() for name in step])
        errors.append((torch.cat([one.flatten() for one in step.values()]) - exact).norm() / exact.norm())
    return float(max(errors))
