# SPDX-License-Identifier: Apache-2.0
"""Which optimizers may be fused, and where fusing them keeps every bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from bagua.optimizers import QAdamOptimizer
from bagua.torch_api.contrib.fuse._trial import why_not_elementwise

# Classes whose step treats each element of a parameter by itself. Classes derived from them may do anything in a step
# of their own, and are tried.
_ELEMENTWISE = {Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, QAdamOptimizer, RAdam, RMSprop, Rprop, SGD}
# Classes that look at a parameter as a whole, by what they do with it; those of torch, and of these names elsewhere.
_TOGETHER = "its step size depends on all parameters together"
_BY_NORM = "it scales an update by norms of the parameter"
_AS_MATRIX = "it preconditions a parameter as a matrix"
_NOT_ELEMENTWISE = {
    "Adafactor": "it keeps sums over the rows and columns of a parameter",
    "DAdaptAdaGrad": _TOGETHER,
    "DAdaptAdam": _TOGETHER,
    "DAdaptAdan": _TOGETHER,
    "DAdaptLion": _TOGETHER,
    "DAdaptSGD": _TOGETHER,
    "Lamb": _BY_NORM,
    "LARS": _BY_NORM,
    "LBFGS": _TOGETHER,
    "Muon": "it orthogonalises the momentum of a parameter as a matrix",
    "Optimizer8bit": "it quantises the state of a parameter in blocks",
    "Prodigy": _TOGETHER,
    "Shampoo": _AS_MATRIX,
    "SOAP": _AS_MATRIX,
    "SparseAdam": "it takes sparse gradients",
}
# Devices whose kernels are known to give an element the same bits wherever it lies in a tensor; of the CPU only
# after a look at what its kernels do.
_DEVICES = ("cpu", "cuda")


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose updates would change if its parameters were one tensor."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fuse_optimizer expects a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    kind = type(optimizer)
    statement = getattr(kind, "bagua_elementwise", None)
    if kind in _ELEMENTWISE or statement is True:
        return
    reason = "its class says `bagua_elementwise = False`" if statement is False else None
    names = {name.casefold(): why for name, why in _NOT_ELEMENTWISE.items()}
    reason = reason or next(
        (names[b.__name__.casefold()] for b in kind.__mro__ if b.__name__.casefold() in names), None
    )
    if reason:
        raise TypeError(
            f"fuse_optimizer cannot fuse {kind.__name__}: {reason}, so fused parameters would get other updates"
        )
    difference = why_not_elementwise(optimizer)
    if difference:
        raise TypeError(
            f"fuse_optimizer cannot fuse {kind.__name__}: it {difference}. If it does update each element of a "
            "parameter independently (without norms of the parameter, as LAMB and LARS use them, and without its "
            "shape), say so with the class attribute `bagua_elementwise = True`"
        )


def keeps_bits(group: dict[str, Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the plain step of this parameter group gives an element the same bits wherever it lies in a tensor."""
    if group.get("differentiable") or device.type not in _DEVICES:
        return False
    # torch's fused kernels for the CPU calculate the last elements of a tensor, those that do not fill a vector, in
    # another way than the rest.
    return device.type != "cpu" or (not group.get("fused") and cpu_kernels_keep_bits(dtype))


@functools.cache
def cpu_kernels_keep_bits(dtype: torch.dtype) -> bool:
    """Whether torch's CPU kernels give the elements that fill a vector and those that do not the same bits.

    float32 and float64: yes, on x86. Types of 16 bits: only where torch has no vector code, for that rounds once where
    the code for single elements rounds twice.
    """
    # 384 values: a difference of rounding, where there is one, shows in about one value of ten.
    generator = torch.Generator(device="cpu").manual_seed(7)
    x, y, z = (torch.randn(384, generator=generator, dtype=torch.float64, device="cpu").to(dtype) for _ in range(3))
    z = z.abs() + 1
    # Of 3 elements, no piece fills a vector.
    pieces = list(zip(*(torch.split(t, 3) for t in (x, y, z)), strict=True))
    with torch.no_grad():
        return all(torch.equal(f(x, y, z), torch.cat([f(*piece) for piece in pieces])) for f in _KERNELS)


# What torch's element-wise optimizers are made of, as far as it rounds.
_KERNELS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda x, y, z: x.add(y, alpha=0.37),
    lambda x, y, z: x.add(0.37),
    lambda x, y, z: x.sub(y),
    lambda x, y, z: x.mul(0.37),
    lambda x, y, z: x.mul(y),
    lambda x, y, z: x.div(z),
    lambda x, y, z: x.div(0.37),
    lambda x, y, z: 0.37 / z,
    lambda x, y, z: z.sqrt(),
    lambda x, y, z: x.lerp(y, 0.1),
    lambda x, y, z: x.lerp(y, 0.7),
    lambda x, y, z: x.addcmul(y, z, value=0.37),
    lambda x, y, z: x.addcdiv(y, z, value=-0.37),
)
