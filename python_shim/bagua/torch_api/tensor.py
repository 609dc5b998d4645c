# SPDX-License-Identifier: Apache-2.0
"""Tensors that algorithms communicate.

A parameter stands for the tensor that really travels, its gradient for instance: the former is the proxy, the latter
the effective tensor. `import bagua.torch_api` gives every `torch.Tensor` the methods of `BaguaTensor`, as the original
Bagua (0.8) did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    Getter = Callable[[Tensor], Tensor | None]
    Setter = Callable[[Tensor, Tensor], None]


class _Backend(Protocol):
    def mark_communication_ready(self, tensor: Tensor) -> None: ...


class _BackendLink:
    """How a tensor finds its scheduler, without keeping it: the scheduler keeps the tensor. Not part of a pickle."""

    def __init__(self, backend: _Backend | None = None) -> None:
        self._backend = None if backend is None else weakref.ref(backend)

    def get(self) -> _Backend | None:
        return None if self._backend is None else self._backend()

    def __reduce__(self) -> tuple[type[_BackendLink], tuple[()]]:
        return _BackendLink, ()


class BaguaTensor:
    """The methods that `import bagua.torch_api` adds to `torch.Tensor`."""

    bagua_tensor_name: str
    bagua_module_name: str

    def is_bagua_tensor(self) -> bool:
        """Return whether `ensure_bagua_tensor` has been called."""
        return hasattr(self, "bagua_tensor_name")

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> BaguaTensor:
        """Make this tensor one that can be communicated.

        Args:
            name: unique within the model; "" by default.
            module_name: the model that it belongs to.
            getter_closure: takes this tensor, returns the effective one; by default this tensor itself.
            setter_closure: takes this tensor and a new effective one, which has to replace the present one.

        The closures replace those of an earlier call, and so does their absence: a parameter that stood for its
        gradient then stands for itself.

        Raises:
            ValueError: it has another name or belongs to another model already, or there is a setter without getter.
        """
        if setter_closure is not None and getter_closure is None:
            raise ValueError("ensure_bagua_tensor: a setter_closure needs its getter_closure")
        wanted = (name or "", module_name or "")
        if self.is_bagua_tensor():
            present = (self.bagua_tensor_name, self.bagua_module_name)
            if name is not None and present != wanted:
                raise ValueError(f"the tensor is {present[0]!r} of model {present[1]!r}, cannot make it {wanted[0]!r}")
        else:
            self.bagua_tensor_name, self.bagua_module_name = wanted
        self._bagua_getter = getter_closure
        self._bagua_setter = setter_closure
        return self

    def bagua_getter_closure(self) -> Tensor:
        """Return the effective tensor. None where there is none yet, such as a gradient before the first backward."""
        tensor = cast("Tensor", self)
        getter = getattr(self, "_bagua_getter", None)
        return tensor if getter is None else getter(tensor)

    def bagua_setter_closure(self, tensor: Tensor) -> None:
        """Replace the effective tensor."""
        setter = getattr(self, "_bagua_setter", None)
        if setter is not None:
            setter(cast("Tensor", self), tensor)
        elif getattr(self, "_bagua_getter", None) is None:
            with torch.no_grad():
                cast("Tensor", self).data = tensor
        else:
            raise RuntimeError(f"tensor {self.bagua_tensor_name!r} has a getter_closure but no setter_closure")

    def bagua_ensure_grad(self) -> BaguaTensor:
        """Give a parameter without gradient one of zeros."""
        if not isinstance(self, torch.nn.Parameter):
            raise NotImplementedError("bagua_ensure_grad() is for parameters")
        if self.grad is None:
            self.grad = torch.zeros_like(self)
        return cast("BaguaTensor", self)

    def bagua_mark_communication_ready(self) -> None:
        """Tell that the effective tensor may be communicated. Its bucket goes once all of its tensors may.

        Raises:
            RuntimeError: the tensor is in no bucket, or is marked for the second time in one step.
        """
        backend = backend_of(cast("Tensor", self))
        if backend is None:
            name = getattr(self, "bagua_tensor_name", "")
            raise RuntimeError(f"tensor {name!r} is in no bucket: tensors_to_buckets() has to put it in one")
        backend.mark_communication_ready(cast("Tensor", self))


def backend_of(tensor: Tensor) -> _Backend | None:
    """Return the scheduler whose buckets hold the tensor."""
    link: _BackendLink | None = getattr(tensor, "_bagua_backend", None)
    return None if link is None else link.get()


def set_backend(tensor: Tensor, backend: _Backend | None) -> None:
    """Let `backend_of` find the scheduler whose buckets hold the tensor."""
    cast("Any", tensor)._bagua_backend = _BackendLink(backend)


def as_bagua(tensor: Any) -> BaguaTensor:
    """For type checkers: a tensor with the methods that `import bagua.torch_api` adds."""
    return cast("BaguaTensor", tensor)
