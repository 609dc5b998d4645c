# SPDX-License-Identifier: Apache-2.0
"""Makes `init_process_group("bagua")` work without `import bagua`.

Loaded by torch, so a package of its own that stays light and never raises: the C++ parts come with the first group.
"""

from __future__ import annotations

from typing import Any


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
    dist.Backend.register_backend("bagua", _create_backend, extended_api=True, devices=["cpu", "cuda"])


def register_at_import() -> None:
    """Register at `import torch`, for a torch that looks no backend up. Entry point of group `torch.backends`."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered"):
        register()
