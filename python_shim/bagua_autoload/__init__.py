# SPDX-License-Identifier: Apache-2.0
"""Makes `init_process_group("bagua")` work without `import bagua`.

Loaded by torch, so a package of its own that stays light and never raises: the C++ parts come with the first group. It
imports nothing of torch before it is called: torch calls it at the end of its own import.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

# Without one of them no CUDA device can be opened: a driver's, an integrated GPU's, that of Windows' subsystem.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")


def _has_gpu() -> bool:
    """Whether CUDA tensors can be made here, found out without starting CUDA.

    CUDA that has been started is of no use to the children that a process forks afterwards, and torch's own
    `is_available()` starts it, or marks it as started, where NVML gives no answer.
    """
    import torch

    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call,unused-ignore]
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        return torch.cuda.device_count() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NVML is installed, its driver is not loaded
        count = torch.cuda._device_count_nvml()
    return count > 0 or (count < 0 and any(os.path.exists(file) for file in _DEVICE_FILES))


class _DevicesThatThereAre(Sequence[str]):
    """The types of devices that a group serves where none are named: those that there are when it is made.

    Where there is no GPU, torch would take "cuda", named beside "cpu", for the device of such a group. It reads them
    at the beginning of a group, and not at the registration, since when CUDA_VISIBLE_DEVICES may have changed.
    """

    def _types(self) -> list[str]:
        return ["cpu", "cuda"] if _has_gpu() else ["cpu"]

    def __getitem__(self, index: Any) -> Any:
        return self._types()[index]

    def __len__(self) -> int:
        return len(self._types())

    def __iter__(self) -> Iterator[str]:
        return iter(self._types())

    def __repr__(self) -> str:
        return repr(self._types())


def _create_backend(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Create the backend of one process group; loads the C++ parts at the first one."""
    from bagua import _backend

    return _backend.create_backend(dist_backend_opts, pg_options)


def register() -> None:
    """Register "bagua" with torch.distributed. Entry point of group `torch.distributed.backends` (torch 2.14+)."""
    import torch.distributed as dist

    if not dist.is_available() or "BAGUA" in dist.Backend._plugins:
        return
    # torch 2.15 would record every operation a second time, which takes as long as an exchange of 4 KiB.
    self_recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(self_recording, set):
        self_recording.add("bagua")
    # A list: torch 2.11 takes a string of devices for a list of letters.
    dist.Backend.register_backend("bagua", _create_backend, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability["bagua"] = _DevicesThatThereAre()  # type: ignore[assignment]


def register_at_import() -> None:
    """Register at `import torch`, for a torch that looks no backend up. Entry point of group `torch.backends`."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered"):
        register()
