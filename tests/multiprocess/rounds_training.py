# SPDX-License-Identifier: Apache-2.0
"""Trainings in rounds that tests follow, and the plain loop beside them."""

import io
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import bagua
import simulations as sim
import torch
from followed_training import take_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Both sides add the ranks' values in another order, and fuse other operations.
CLOSE = 2e-6


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Plan(NamedTuple):
    """The options of diloco that a plain loop follows."""

    sync_every: int = 6
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def register(self, ddp: DDP, optimizer: torch.optim.Optimizer, **options: Any) -> bagua.Handle:
        return register(ddp, optimizer, **self._asdict(), **options)


class PlainRounds(sim.Nothing):
    """All ranks in one process: the rule as the issue writes it, with torch's own optimizer as the outer one."""

    def __init__(self, models: Sequence[nn.Module], plan: Plan) -> None:
        self.plan, self.cut, self.steps = plan, _CONSECUTIVE[plan.fragments], 0
        self.outer = [p.detach().clone().requires_grad_() for p in models[0].parameters()]
        momentum = {"momentum": plan.outer_momentum, "nesterov": plan.nesterov and plan.outer_momentum > 0}
        self.optimizers = [
            torch.optim.SGD([self.outer[index] for index in fragment], lr=plan.outer_lr, **momentum)  # type: ignore[arg-type]
            for fragment in self.cut
        ]

    def after_step(self, models: Sequence[nn.Module]) -> None:
        self.steps += 1
        interval, plan = self.plan.sync_every // self.plan.fragments, self.plan
        for fragment, indices in enumerate(self.cut):
            for index in indices:
                if (self.steps + plan.delay) % plan.sync_every == (fragment + 1) * interval % plan.sync_every:
                    locals_ = [list(model.parameters())[index].detach() for model in models]
                    if self.steps > 0:
                        self.outer[index].grad = torch.stack([self.outer[index].detach() - x for x in locals_]).mean(0)
        for fragment, indices in enumerate(self.cut):
            if self.steps % plan.sync_every == (fragment + 1) * interval % plan.sync_every:
                self.optimizers[fragment].step()
                for index, model in itertools.product(indices, models):
                    weight = list(model.parameters())[index].detach()
                    weight.copy_(self.outer[index].detach() * (1 - plan.mixing) + weight * plan.mixing)


def three_layers() -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(23, 9), nn.Tanh(), nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 3))
    return model.to(torch.get_default_device())


# The parameters of three_layers() in so many fragments.
_CONSECUTIVE = {1: [range(6)], 2: [range(2), range(2, 6)], 3: [range(2), range(2, 4), range(4, 6)]}
PLANS = [
    Plan(),
    Plan(1, outer_lr=1.0, outer_momentum=0.0),
    Plan(6, 2),
    Plan(6, 3, delay=1, mixing=0.25),
    Plan(8, 2, delay=3, mixing=1.0),
    Plan(6, 1, delay=5, mixing=0.5, outer_lr=1.0),
]


def simulated(
    make: Callable[[Sequence[nn.Module]], sim.Nothing],
    size: int,
    steps: sim.Plan,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum_sgd,
) -> list[list[Tensor]]:
    """The weights of every rank after every step of the plain loop: [step][rank]."""
    models = sim.copies(three_layers(), size)
    return sim.simulate(models, [make_optimizer(model) for model in models], make(models), steps)


def assert_close(histories: Sequence[list[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    for step, weights in enumerate(expected):
        for rank, history in enumerate(histories):
            error = (history[step] - weights[rank]).abs().max().item()
            assert error <= CLOSE, f"rank {rank} is off by {error:.2g} after step {step + 1}"
    assert (expected[-1][0] - expected[0][0]).abs().max() > 1e3 * CLOSE, "training that hardly moves shows nothing"


Register = Callable[[DDP, torch.optim.Optimizer], bagua.Handle]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Training(NamedTuple):
    ddp: DDP
    optimizer: torch.optim.Optimizer
    handle: bagua.Handle

    def step(self, number: int) -> None:
        self.take([sim.Batch(number)])

    def take(self, batches: Sequence[sim.Batch]) -> None:
        """One step of the optimizer."""
        take_step(self.ddp, self.optimizer, batches)

    def weights(self) -> Tensor:
        return sim.flat(self.ddp.parameters())


def begun(register: Register, make_optimizer: MakeOptimizer = momentum_sgd, **ddp_options: Any) -> Training:
    ddp = DDP(three_layers(), **ddp_options)
    optimizer = make_optimizer(ddp)
    return Training(ddp, optimizer, register(ddp, optimizer))


def begun_anew(training: Training, begin: Callable[[], Training]) -> Training:
    """A training as a checkpoint of another has it."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (training.ddp.module, training.optimizer, training.handle)], file)
    file.seek(0)
    another = begin()
    for part, state in zip((another.ddp.module, another.optimizer, another.handle), torch.load(file), strict=True):
        part.load_state_dict(state)
    return another


def register(ddp: DDP, optimizer: torch.optim.Optimizer, algorithm: str = "diloco", **options: Any) -> bagua.Handle:
    return bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)


def averaged_every(steps: int) -> Register:
    """local_sgd."""
    return partial(register, algorithm="local_sgd", sync_every=steps)


def train(
    register: Register, make_optimizer: MakeOptimizer, steps: sim.Plan, **ddp_options: Any
) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Tensor]]]:
    training = begun(register, make_optimizer, **ddp_options)
    history, states = [], []
    for batches in steps:
        training.take(batches)
        history.append(training.weights())
        states.append({name: value.clone() for name, value in training.handle.state_dict()["state"].items()})
    return history, training.handle.stats(), states
