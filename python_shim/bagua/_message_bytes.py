# SPDX-License-Identifier: Apache-2.0
"""How many bytes the messages of an algorithm take, from the shapes of a model's parameters."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua._native import _C

_SMALL = 1024
_FINER = dict.fromkeys(("embedding", "head", "1d"), "int8")
_FLOAT = 4


class Parameter(NamedTuple):
    """A parameter: its name, its shape, "embedding", "head" or "" for its role, and the bytes of an element."""

    name: str
    shape: tuple[int, ...]
    role: str = ""
    itemsize: int = _FLOAT

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.elements * self.itemsize

    def _is_meant(self, key: str) -> bool:
        if key == "1d":
            return len(self.shape) <= 1
        if key == "small":
            return self.elements < _SMALL
        return self.role == key or fnmatch.fnmatchcase(self.name, key)


def parameters_of(tensors: Iterable[torch.Tensor], names_and_roles: Iterable[tuple[str, str]]) -> list[Parameter]:
    """Return the parameters of a model as this module counts them."""
    pairs = zip(tensors, names_and_roles, strict=True)
    return [Parameter(name, tuple(tensor.shape), role, tensor.itemsize) for tensor, (name, role) in pairs]


def _bits(codec: str) -> float:
    """Return the bits of an element, with the scales of its groups."""
    many = 1 << 20  # without the header
    return 8 * (_C.packed_bytes(codec, many) - _C.packed_bytes(codec, 0)) / many


def coded_bytes(options: Mapping[str, Any], parameters: Iterable[Parameter]) -> float:
    """Return the bytes that stand for the gradients, or the weights, in one exchange with these complete options."""
    if "min_compression" in options:
        return sum(_bytes_of_factors(parameter, options) for parameter in parameters)
    exact = _words(options.get("exact"))
    codecs = [tuple(part.strip() for part in word.rpartition("=")[::2]) for word in _words(options.get("codec"))]
    is_alone = len(codecs) == 1 and "=" not in options["codec"]
    if is_alone and "exact" in options and _bits(codecs[0][1]) < 8:
        codecs = [*_FINER.items(), *codecs]
    total = 0.0
    for parameter in parameters:
        codec = next((codec for key, codec in codecs if not key or parameter._is_meant(key)), None)
        is_exact = codec is None or any(parameter._is_meant(key) for key in exact)
        total += parameter.nbytes if codec is None or is_exact else parameter.elements * _bits(codec) / 8
    return total


def _words(text: Any) -> list[str]:
    return [word.strip() for word in str(text or "").split(",") if word.strip()]


def _bytes_of_factors(parameter: Parameter, options: Mapping[str, Any]) -> float:
    rows = parameter.shape[0] if parameter.shape else 1
    columns = parameter.elements // max(rows, 1)
    factors = (rows + columns) * min(options["rank"], rows, columns)
    is_matrix = len(parameter.shape) > 1 and factors * options["min_compression"] < parameter.elements
    bits = _bits(options["codec"]) if options.get("codec") else 8 * _FLOAT
    return factors * bits / 8 if is_matrix else parameter.nbytes


def sentence(hook: _C.Hook, parameters: list[Parameter], group: dist.ProcessGroup, warm_up: int = 0) -> str:
    """Return in one line what an algorithm makes of the bytes of a model, for the log.

    `warm_up`: so many steps of the optimizer want full precision.
    """
    options = hook.options
    is_of_weights = "sync_every" in options or "sync_interval_ms" in options or "communication_interval" in options
    plain = sum(parameter.nbytes for parameter in parameters)
    coded = coded_bytes(options, parameters)
    factors = f"factors of rank {options['rank']}" if "rank" in options else ""
    how = ", ".join(filter(None, (factors, str(options.get("codec") or "")))) or "full precision"
    when = "a step"
    if is_of_weights:
        every = options.get("sync_every", options.get("communication_interval"))
        when = "a round" if every in (None, "auto") else f"every {every} steps" if every != 1 else when
    exact = options.get("start_step") or options.get("warmup_steps") or warm_up
    begin = f", after {exact:,} steps in full precision" if exact else ""
    text = f"{hook.name}: {how}, {plain / 1e6:,.1f} MB of {'weights' if is_of_weights else 'gradients'}"
    text += f" become {coded / 1e6:,.1f} MB {when}{begin}; {group.size()} ranks"
    own = len(hook.host_ranks)
    return text if own in (0, group.size()) else f"{text}, {own} of them on this host"
