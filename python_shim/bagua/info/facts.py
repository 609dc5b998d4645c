# SPDX-License-Identifier: Apache-2.0
"""What there is on this machine, and what is missing with the command that mends it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

import bagua
from bagua import _build_info
from bagua._native import _C
from bagua.info import congestion, nccl_net, network

_SHARED_MEMORY = Path("/dev/shm")
# Two slots of 512 KiB for each rank of a group.
_MIB_PER_RANK = 1
_SMALL_SHARED_MEMORY_MIB = 64
# What is optional -> the packages of which one will do, and what it is for.
_OPTIONAL = {
    "lightning": (("lightning", "pytorch_lightning"), "bagua.lightning"),
    "matplotlib": (("matplotlib",), "the pictures of python -m bagua.bench --plot"),
}


def facts() -> dict[str, str]:
    """Return what there is: name -> value."""
    return {
        "bagua": bagua.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "CPU": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "GPUs": _gpus(),
        "built for torch": _build_info.TORCH_VERSION,
        "built with": f"{_build_info.COMPILER}, {_build_info.BUILD_TYPE}",
        "built with CUDA": _cuda(),
        "NCCL": _nccl(),
        "CPU tensors, in a host": _shared_memory()[0],
        "CPU tensors, between hosts": _between_hosts(),
        "congestion control": f"{congestion.in_use()} (allowed: {', '.join(congestion.allowed())})",
        "protection between hosts": _protection(),
        "CUDA tensors": "NCCL" if _build_info.CUDA_VERSION and torch.cuda.is_available() else "nothing",
        "CUDA tensors, between hosts": nccl_net.in_use(),
        "interfaces": ", ".join(f"{name} {at}" for name, at in network.interfaces().items()) or "none",
        "settings": _settings(),
        "host id": _C.local_host_id(),
        "algorithms": ", ".join(bagua.available_algorithms()),
    }


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none usable"
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} ({gpu.total_memory >> 30} GiB, sm_{gpu.major}{gpu.minor})" for gpu in found)


def _cuda() -> str:
    if _build_info.CUDA_VERSION is None:
        return "no"
    return f"{_build_info.CUDA_VERSION} ({', '.join(_build_info.CUDA_ARCHS)})"


def _nccl() -> str:
    if _build_info.NCCL_VERSION is None:
        return "none"
    if torch.cuda.is_available():
        loaded = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        return f"{loaded}, built with {_build_info.NCCL_VERSION}"
    return _build_info.NCCL_VERSION


def _shared_memory() -> tuple[str, str]:
    """Return what carries CPU tensors inside a host, and what to do where it could be faster."""
    if os.environ.get("BAGUA_SHARED_MEMORY") == "0":
        return "sockets, because BAGUA_SHARED_MEMORY=0", "type 'unset BAGUA_SHARED_MEMORY' to use shared memory"
    mount = "run the container with '--ipc=host' or '--shm-size=1g'"
    if not _SHARED_MEMORY.is_dir() or not os.access(_SHARED_MEMORY, os.W_OK):
        return f"sockets, because {_SHARED_MEMORY} cannot be written to", mount
    usage = shutil.disk_usage(_SHARED_MEMORY)
    free = usage.free >> 20
    text = f"shared memory ({free:,} of {usage.total >> 20:,} MiB of {_SHARED_MEMORY} are free)"
    if free < _SMALL_SHARED_MEMORY_MIB:
        return text, f"{_SHARED_MEMORY} is small, a group takes {_MIB_PER_RANK} MiB for each rank: {mount}"
    return text, ""


def _between_hosts() -> str:
    try:
        address, reason = network.listening_address()
        first, last = _C.listening_ports()
    except ValueError as error:
        return f"nothing: {error}"
    ports = f"port {first}" if first == last else f"ports {first} to {last}"
    return f"bagua's own transport, at {address} ({reason}), {ports if first else 'any port'}"


def _settings() -> str:
    prefixes = ("BAGUA_", "GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_")
    shown = {**os.environ}
    # The one that nobody is to read.
    if "BAGUA_JOB_SECRET" in shown:
        shown["BAGUA_JOB_SECRET"] = "(not shown)"
    found = [f"{name}={value}" for name, value in sorted(shown.items()) if name.startswith(prefixes)]
    return " ".join(found) or "none in the environment"


def _protection() -> str:
    try:
        fingerprint = _C.job_secret_fingerprint()
    except (ValueError, NotImplementedError) as error:
        return f"cannot be protected: {error}"
    return f"encrypted, with the job secret {fingerprint} (its fingerprint)" if fingerprint else "no job secret"


def advice(own: Mapping[str, str]) -> Iterator[str]:
    """Yield what is missing and how to mend it."""
    if torch.cuda.is_available() and _build_info.CUDA_VERSION is None:
        yield (
            "there is a GPU, but bagua was built without CUDA: in its source type 'pip install --no-build-isolation "
            "--force-reinstall --no-deps .' (or 'make build CUDA=ON'), with a torch that has CUDA"
        )
    if _build_info.CUDA_VERSION is not None and not torch.cuda.is_available():
        yield "bagua was built with CUDA, but torch sees no usable GPU: only CPU tensors are communicated here"
    if torch.cuda.is_available() and _build_info.CUDA_VERSION is not None:
        yield from _architectures()
    remedy = _shared_memory()[1]
    if remedy:
        yield remedy
    yield from _interfaces()
    if congestion.in_use() != congestion.BBR and congestion.BBR not in congestion.allowed():
        yield (
            f"several machines: where a long line loses packets, {congestion.in_use()} is many times slower than BBR, "
            f"which no process may choose here: an administrator allows it with "
            f"{' and '.join(repr(command) for command in congestion.commands_for_bbr())}"
        )
    for package, (names, purpose) in _OPTIONAL.items():
        if not any((spec := importlib.util.find_spec(name)) and spec.origin for name in names):
            yield f"{package} is not installed, which {purpose} would need: type 'pip install {package}'"


def _architectures() -> Iterator[str]:
    built = [int(name.removeprefix("sm_")) for name in _build_info.CUDA_ARCHS]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        own = 10 * major + minor
        # Code for an architecture also runs on later ones of the same generation.
        if not any(arch // 10 == major and arch <= own for arch in built):
            yield (
                f"GPU {index} is of sm_{own}, which bagua was not built for: install it again with "
                f"'--config-settings=cmake.define.BAGUA_CUDA_ARCHS={own}'"
            )


def _interfaces() -> Iterator[str]:
    outward = network.outward()
    name = outward[0] if outward else "NAME"
    try:
        address, reason = network.listening_address()
    except ValueError as error:
        yield f"{error}: type 'export BAGUA_SOCKET_IFNAME={name}'"
        return
    if network.is_loopback(address):
        yield (
            f"several machines: others cannot reach {address}, where bagua listens ({reason}): type "
            f"'export BAGUA_SOCKET_IFNAME={name}' on each (and NCCL_SOCKET_IFNAME for CUDA tensors)"
        )
    elif len(outward) > 1 and "SOCKET_IFNAME" not in reason:
        yield (
            f"several machines: if they are not connected through {address}, type 'export BAGUA_SOCKET_IFNAME=...' "
            f"with one of {', '.join(outward)}, and NCCL_SOCKET_IFNAME likewise"
        )


def table(rows: Mapping[str, str]) -> str:
    """Return names and values in two columns."""
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
