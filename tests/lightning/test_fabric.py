# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers that Fabric has set up, or a loop of one's own."""

import gc
import weakref

import bagua
import torch
from hooked_models import loss_of, perceptron
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel as DDP


@on_ranks(2)
def test_what_fabric_has_set_up_is_unwrapped() -> None:
    from lightning.fabric import Fabric

    ddp = DDP(perceptron())
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01))
    assert not isinstance(model, DDP)
    assert hasattr(optimizer, "optimizer")
    handle = bagua.register_comm_hook(model, "low_precision_decentralized", optimizer=optimizer)
    for step in range(3):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step))
        optimizer.step()
    assert handle.stats()["rounds"] == 3, "the steps of the optimizer were not seen"
    handle.remove()


@on_ranks(2)
def test_an_optimizer_that_fabric_wraps_gets_the_momenta_itself() -> None:
    from lightning.fabric import Fabric

    weights = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model: torch.nn.Module = DDP(perceptron())
        optimizer: torch.optim.Optimizer = bagua.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        if is_wrapped:
            model, optimizer = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
        with bagua.register_comm_hook(model, "qadam", optimizer=optimizer):
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


@on_ranks(2)
def test_a_module_that_is_wrapped_again_with_another_optimizer_keeps_nothing_of_the_training_before() -> None:
    module = perceptron()
    hooks = []
    for _ in range(2):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        hooks.append(weakref.ref(bagua.register_comm_hook(DDP(module), "local_sgd", optimizer=optimizer)._hook))
        gc.collect()
    assert hooks[0]() is None
