# SPDX-License-Identifier: Apache-2.0
"""The algorithms that own weights or momentum, from their definitions: plain torch, all ranks in one process.

Here every rank is a model and an optimizer in two lists, stepped together; an algorithm is asked at the three places
where something is exchanged. Nothing of bagua is used.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from test_bytegrad_definition import CODES, defined_result
from torch import Tensor, nn

Loss = Callable[[nn.Module, int, int], Tensor]
Layout = Sequence[Sequence[int]]  # the indices of the parameters of each bucket, in the bucket's order


class Batch(NamedTuple):
    number: int
    synchronised: bool = True  # False: under no_sync()


Plan = Sequence[Sequence[Batch]]  # the batches of every step of the optimizer


def one_batch_a_step(steps: int) -> Plan:
    return [[Batch(step)] for step in range(steps)]


def accumulating(steps: int, *, synchronised: bool) -> Plan:
    """Two batches a step, the first of them under no_sync() or not."""
    return [[Batch(2 * step, synchronised), Batch(2 * step + 1)] for step in range(steps)]


def batch_loss(model: nn.Module, number: int, rank: int) -> Tensor:
    """Of a regression whose targets are another function on every rank, so that ranks left alone drift apart."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    weight = next(model.parameters())
    inputs = torch.randn(6, 23, generator=generator, device="cpu").to(weight)
    loss: Tensor = (model(inputs) - inputs[:, :1] * (rank + 1)).square().mean()
    return loss


def narrow_model() -> nn.Module:
    """138 parameters, one bucket."""
    with torch.device("cpu"):  # whose numbers, of one seed, a GPU draws otherwise
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(23, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.to(torch.get_default_device())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def assign(tensors: Sequence[Tensor], values: Tensor) -> None:
    """The inverse of flat()."""
    for tensor, part in zip(tensors, values.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


def participants(size: int, hosts: str, hierarchical: bool) -> list[list[int]]:
    """The ranks that count as one: those of a host in the hierarchical form. hosts "" is one host."""
    if not hierarchical:
        return [[rank] for rank in range(size)]
    named = hosts or "h" * size
    return [[rank for rank in range(size) if named[rank] == host] for host in sorted(set(named))]


class Nothing:
    """An algorithm that exchanges nothing; the others override what they do."""

    def at_forward(self, models: Sequence[nn.Module]) -> None: ...
    def after_backward(self, models: Sequence[nn.Module]) -> None: ...
    def after_step(self, models: Sequence[nn.Module]) -> None: ...


def simulate(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Nothing,
    plan: Plan,
    loss: Loss = batch_loss,
) -> list[list[Tensor]]:
    """The weights of every rank after every step: [step][rank]."""
    history = []
    for step in plan:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in step:
            if batch.synchronised:
                algorithm.at_forward(models)
            for rank, model in enumerate(models):
                loss(model, batch.number, rank).backward()
            if batch.synchronised:
                algorithm.after_backward(models)
        for optimizer in optimizers:
            optimizer.step()
        algorithm.after_step(models)
        history.append([flat(model.parameters()) for model in models])
    return history


def copies(model: nn.Module, size: int) -> list[nn.Module]:
    return [copy.deepcopy(model) for _ in range(size)]


def average_gradients(models: Sequence[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        average = mean([_gradient(parameter) for parameter in parameters])
        for parameter in parameters:
            _gradient(parameter).copy_(average)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# --- decentralized ---


def shift_one_peer(place: int, count: int, communications: int) -> int:
    half = count // 2
    if place < half:
        return (communications + place) % half + half
    return (place - half - communications) % half


class Decentralized(Nothing):
    """x := average - lr * gradient at the x before, the average one of what the ranks held at the forward's start."""

    def __init__(self, places: Sequence[Sequence[int]], mode: str = "all", interval: int = 1) -> None:
        self.places, self.mode, self.interval = places, mode, interval
        self.steps = self.communications = 0
        self.averages: list[Tensor] = []
        self.averaged: list[list[Tensor]] = []  # the weights after every backward

    def at_forward(self, models: Sequence[nn.Module]) -> None:
        if self.steps % self.interval == 0:
            self.averages = self.exchange([flat(model.parameters()) for model in models])
            self.communications += 1
        self.steps += 1

    def after_backward(self, models: Sequence[nn.Module]) -> None:
        for model, average in zip(models, self.averages, strict=False):
            assign(list(model.parameters()), average)
        self.averages = []
        self.averaged.append([flat(model.parameters()) for model in models])

    def exchange(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self.mode == "all":
            return [mean(weights)] * len(weights)
        count = len(self.places)
        means = [mean([weights[rank] for rank in ranks]) for ranks in self.places]
        results = list(weights)
        for place, ranks in enumerate(self.places):
            peer = shift_one_peer(place, count, self.communications) if count > 1 else place
            for rank in ranks:
                results[rank] = (means[place] + means[peer]) / 2
        return results


# --- low_precision_decentralized ---


def own_layout(parameters: Sequence[Tensor], bucket_bytes: int = 10 * 2**20) -> Layout:
    """Of parameters of one dtype: in reversed order, a bucket closed once it holds the bytes."""
    layout: list[list[int]] = [[]]
    held = 0
    for index in reversed(range(len(parameters))):
        if held >= bucket_bytes:
            layout.append([])
            held = 0
        layout[-1].append(index)
        held += parameters[index].nbytes
    return layout


class Ring:
    """The replicas of one bucket, or of one lane of it, of every participant."""

    def __init__(self, weights: Sequence[Tensor], codec: str = "int8") -> None:
        count = len(weights)
        self.code = CODES[codec]
        self.own = [weight.clone() for weight in weights]
        self.left = [weights[place - 1].clone() for place in range(count)]
        self.right = [weights[(place + 1) % count].clone() for place in range(count)]

    def exchange(self, weights: Sequence[Tensor]) -> list[Tensor]:
        count = len(weights)
        third, five_thirds = torch.tensor(1 / 3), torch.tensor(5 / 3)
        messages = [
            self.code(x + third * left + third * right - five_thirds * own)
            for x, left, right, own in zip(weights, self.left, self.right, self.own, strict=True)
        ]
        for place in range(count):
            self.left[place] += messages[place - 1]
            self.right[place] += messages[(place + 1) % count]
            self.own[place] = messages[place] + self.own[place]
        return self.own


class LowPrecisionDecentralized(Nothing):
    """After a step every participant sends to its neighbours how far it is from its replica, in 8 bits."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        places: Sequence[Sequence[int]],
        layout: Layout,
        interval: int = 1,
        codec: str = "int8",
    ) -> None:
        self.places, self.layout, self.interval = places, layout, interval
        self.steps, self.due = 0, False
        self.lanes = max(len(ranks) for ranks in places)
        # By bucket and lane.
        self.rings = [[Ring(lane, codec) for lane in self._lanes(models, bucket)] for bucket in layout]

    def at_forward(self, models: Sequence[nn.Module]) -> None:
        self.due = self.steps % self.interval == 0
        self.steps += 1

    def after_step(self, models: Sequence[nn.Module]) -> None:
        if not self.due or len(models) == 1:
            return
        self.due = False
        for bucket, rings in zip(self.layout, self.rings, strict=True):
            lanes = self._lanes(models, bucket)
            if len(self.places) > 1:
                lanes = [ring.exchange(lane) for ring, lane in zip(rings, lanes, strict=True)]
            for place, ranks in enumerate(self.places):
                for rank in ranks:
                    assign(self._parameters(models[rank], bucket), torch.cat([lane[place] for lane in lanes]))

    def _parameters(self, model: nn.Module, bucket: Sequence[int]) -> list[Tensor]:
        parameters = list(model.parameters())
        return [parameters[index] for index in bucket]

    def _lanes(self, models: Sequence[nn.Module], bucket: Sequence[int]) -> list[list[Tensor]]:
        """The weights of every participant, the mean of its ranks, by lane."""
        weights = [mean([flat(self._parameters(models[rank], bucket)) for rank in ranks]) for ranks in self.places]
        length = -(-weights[0].numel() // self.lanes)
        return [list(lane) for lane in zip(*(weight.split(length) for weight in weights), strict=True)]


# --- qadam ---


class ReferenceQAdam(torch.optim.Optimizer):
    """Adam whose moments rest at step `warmup`, and whose gradient is the first moment itself from then on."""

    def __init__(self, params: Any, warmup: int, **options: Any) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options}
        super().__init__(params, defaults)
        self.warmup, self.steps = warmup, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m, v = self.moments(p)
                if self.steps < self.warmup:
                    gradient = p.grad + group["weight_decay"] * p
                    m.mul_(beta1).add_((1 - beta1) * gradient)
                    v.mul_(beta2).add_((1 - beta2) * gradient.square())
                elif self.steps > self.warmup:
                    m.copy_(p.grad)
                denominator = v.sqrt() / (1 - beta2**self.steps) ** 0.5 + group["eps"]
                p.sub_(group["lr"] / (1 - beta1**self.steps) * m / denominator)

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[p]
        if not state:
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
        return state["m"], state["v"]


class QAdam(Nothing):
    """Means of gradients until the warm-up is over, then means of first moments through 8-bit messages."""

    def __init__(
        self,
        optimizers: Sequence[ReferenceQAdam],
        places: Sequence[Sequence[int]],
        layout: Layout,
        codec: str = "int8",
    ) -> None:
        self.optimizers, self.places, self.layout, self.codec = optimizers, places, layout, codec
        self.returned: dict[Tensor, Tensor] = {}  # in this step

    def after_backward(self, models: Sequence[nn.Module]) -> None:
        if self.optimizers[0].steps < self.optimizers[0].warmup:
            average_gradients(models)
            return
        for bucket in self.layout:
            by_rank = [[list(model.parameters())[index] for index in bucket] for model in models]
            moments = [
                flat(self._moment(p, optimizer) for p in parameters)
                for parameters, optimizer in zip(by_rank, self.optimizers, strict=True)
            ]
            result = self._reduce(moments)
            for parameters in by_rank:
                assign([_gradient(p) for p in parameters], result)
                self.returned.update((p, _gradient(p).clone()) for p in parameters)

    def after_step(self, models: Sequence[nn.Module]) -> None:
        self.returned = {}

    def _moment(self, p: Tensor, optimizer: ReferenceQAdam) -> Tensor:
        beta1: float = next(g["betas"][0] for g in optimizer.param_groups if any(p is member for member in g["params"]))
        # A second synchronised backward of a step finds its gradient added to what the first returned.
        if p in self.returned:
            moment, gradient = self.returned[p], _gradient(p) - self.returned[p]
        else:
            moment, gradient = beta1 * optimizer.moments(p)[0], _gradient(p)
        return moment + (1 - beta1) * gradient

    def _reduce(self, moments: Sequence[Tensor]) -> Tensor:
        size, count = len(moments), len(self.places)
        if count == size:
            return defined_result(list(moments), codec=self.codec) if size > 1 else moments[0]
        if count == 1:
            return mean(moments)
        # The mean is over ranks: a host counts by how many it has.
        shares = [mean([moments[rank] for rank in ranks]) * (count * len(ranks) / size) for ranks in self.places]
        lanes = max(len(ranks) for ranks in self.places)
        length = -(-shares[0].numel() // lanes)
        lanes_of_shares = zip(*(share.split(length) for share in shares), strict=True)
        return torch.cat([defined_result(list(lane), codec=self.codec) for lane in lanes_of_shares])


# --- async ---


class AsyncAverage(Nothing):
    """Ranks in step, slow enough that a round that one forward starts has come in at the next.

    That forward starts the next round; where its end is seen there and the interval begins only then, the one after.
    """

    def __init__(self, warmup: int = 0, *, rests_after_a_round: bool = False) -> None:
        self.warmup, self.forwards = warmup, 0
        self.rests_after_a_round = rests_after_a_round
        self.snapshots: list[Tensor] = []

    def at_forward(self, models: Sequence[nn.Module]) -> None:
        self.forwards += 1
        if self.forwards <= self.warmup:
            return
        weights = [list(model.parameters()) for model in models]
        if self.snapshots:
            average = mean(self.snapshots)
            for parameters, snapshot in zip(weights, self.snapshots, strict=True):
                assign(parameters, flat(parameters) + (average - snapshot))
            if self.rests_after_a_round:
                self.snapshots = []
                return
        self.snapshots = [flat(parameters) for parameters in weights]

    def after_backward(self, models: Sequence[nn.Module]) -> None:
        if self.forwards <= self.warmup:
            average_gradients(models)
