# SPDX-License-Identifier: Apache-2.0
"""Finds out by a trial whether an optimizer of an unknown class treats each element of a parameter by itself."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

_STEPS = 24
# Norms of the parameters and of their gradients lie far apart, so that whatever is scaled or clipped by a norm differs;
# dimensions too, for what is done to matrices only. Even numbers of elements, see _gradient().
_SHAPES = ((4, 6), (10,), (2, 3, 2))
_WEIGHTS = (10.0, 1.0, 0.1)
_GRADIENTS = (1e-3, 1.0, 1e3)
# Attributes that torch gives to every optimizer.
_NOT_COPIED = ("state", "param_groups")


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """Take some steps with a copy, on small parameters by themselves and on the same ones as one: the same bits?

    Neither the optimizer nor the generators of random numbers are changed.

    Returns:
        What differs, in words for a sentence that begins with "it"; None: nothing.
    """
    kept = _what_it_keeps(optimizer)
    if kept:
        return kept
    device, dtype = _place_of(optimizer)
    generator = torch.Generator().manual_seed(11)
    drawn = [
        [torch.randn(shape, generator=generator).to(device, dtype) for shape in _SHAPES] for _ in range(_STEPS + 1)
    ]
    weights = [value * scale for value, scale in zip(drawn[0], _WEIGHTS, strict=True)]
    # Each parameter has each scale in turn.
    gradients = [
        [value * _GRADIENTS[(place + step // 8) % 3] for place, value in enumerate(values)]
        for step, values in enumerate(drawn[1:])
    ]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            alone = _trained(optimizer, weights, gradients)
            as_one = _trained(optimizer, [_flat(weights)], [[_flat(step)] for step in gradients])
    except Exception as error:
        return f"could not be tried on small parameters ({type(error).__name__}: {error})"
    for (parameters, _), (fused, _) in zip(alone, as_one, strict=True):
        if not torch.equal(_flat(parameters), fused[0].detach()):
            return "gave other weights to small parameters that were fused into one for a trial"
    return next((reason for group in (*alone, *as_one) for reason in _strange_state(*group)), None)


def _what_it_keeps(optimizer: Optimizer) -> str | None:
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    for name, value in own.items():
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value if _is_list(value) else (value,)
        if any(isinstance(part, (Tensor, Optimizer, torch.nn.Module)) for part in parts):
            return f"keeps tensors or modules outside of its state, in {name!r}"
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set))


def _place_of(optimizer: Optimizer) -> tuple[torch.device, torch.dtype]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    first = parameters[0] if parameters else torch.empty(0)
    # The arithmetic of 16 bits depends on the place in a vector, on CPUs.
    is_wide = first.dtype in (torch.float32, torch.float64) or (first.is_floating_point() and first.is_cuda)
    return first.device, first.dtype if is_wide else torch.float32


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _trained(
    optimizer: Optimizer, weights: list[Tensor], gradients: list[list[Tensor]]
) -> list[tuple[list[Parameter], dict[Tensor, Any]]]:
    """For each group, parameters and state after the steps."""
    trial = type(optimizer).__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    hooks: dict[str, Any] = {name: OrderedDict() for name, value in own.items() if isinstance(value, OrderedDict)}
    # A scheduler puts a wrapper of its own in the place of the class's step.
    own.pop("step", None)
    trial.__dict__.update(copy.deepcopy({name: value for name, value in own.items() if name not in hooks}) | hooks)
    trial.state = defaultdict(dict)
    trial.param_groups = [
        copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        | {"params": [Parameter(value.clone()) for value in weights]}
        for group in optimizer.param_groups
    ]
    for number, step in enumerate(gradients):
        for group in trial.param_groups:
            for parameter, drawn in zip(group["params"], step, strict=True):
                parameter.grad = _gradient(number, parameter.detach(), drawn)
        trial.step()
    return [(group["params"], trial.state) for group in trial.param_groups]


def _gradient(number: int, parameter: Tensor, drawn: Tensor) -> Tensor:
    """In every third step orthogonal to the parameter, for what looks at the angle between the two."""
    if number % 3 != 2:
        return drawn.clone()
    first, second = parameter.reshape(-1, 2).unbind(1)
    return torch.stack([second, -first], 1).reshape(parameter.shape).contiguous()


def _strange_state(parameters: list[Parameter], state: dict[Tensor, Any]) -> list[str]:
    return [
        f"keeps a state {name!r} that is neither a number nor of the shape of the parameter"
        for parameter in parameters
        for name, value in state.get(parameter, {}).items()
        if not isinstance(value, (bool, int, float, str, type(None)))
        and not (isinstance(value, Tensor) and (value.dim() == 0 or value.shape == parameter.shape))
    ]
