# SPDX-License-Identifier: Apache-2.0
"""Ranks whose settings or checkpoints differ: an error on all of them, before anything is averaged wrongly."""

import copy
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua import _executors
from bagua._executors import arithmetic_of
from hooked_models import SMALL_BUCKETS, emulated_hosts, new_group, perceptron, take_steps
from ranks import Pools, RankPool, on_ranks, run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = 20.0  # within which an error has to come; a rank that waits for another does so for a minute


def _message(error: type[Exception], call: Callable[[], object]) -> str:
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - begin < SECONDS
    return str(caught.value)


# --- settings ---


def _make_groups() -> list[str]:
    """With a group of backend bagua, and with a hook on a stock one."""

    def make_group() -> None:
        with new_group(backend="bagua"):
            pass

    return [
        _message(ValueError, make_group),
        _message(ValueError, lambda: bagua.register_comm_hook(DDP(perceptron()), "bytegrad")),
    ]


def _messages_with(variable: str, values: list[str]) -> set[str]:
    return set().union(*run_ranks(len(values), _make_groups, backend="gloo", env={variable: values}))


def test_ranks_with_other_settings_are_all_told_both_and_what_to_do() -> None:
    (message,) = _messages_with("BAGUA_NCCL_CHANNELS", ["1", "1", "2"])
    assert "rank 0 and rank 2 cannot work in one group" in message
    assert "BAGUA_NCCL_CHANNELS is '1' on rank 0 and '2' on rank 2: set this environment variable" in message


def test_nobody_waits_for_a_rank_whose_settings_are_wrong() -> None:
    (message,) = _messages_with("BAGUA_DEFAULT_BUCKET_SIZE", ["1000", "many"])
    assert "rank 1 cannot take part in a group" in message
    assert "BAGUA_DEFAULT_BUCKET_SIZE is to be a positive number of bytes, got 'many'" in message


# --- GPUs whose products have other bits ---


def _register_on(gpus: list[str], algorithm: str) -> str:
    """With a made-up GPU for each rank; the message of the error, if there is one."""
    gpu = gpus[dist.get_rank()]
    with new_group(backend="bagua") as group, mock.patch.object(_executors, "arithmetic_of", return_value=gpu):
        ddp = DDP(perceptron(), process_group=group)
        if algorithm == "powersgd" and len(set(gpus)) > 1:
            return _message(ValueError, lambda: bagua.register_comm_hook(ddp, algorithm))
        bagua.register_comm_hook(ddp, algorithm)
    return ""


def test_powersgd_refuses_gpus_that_would_get_other_products() -> None:
    unlike = ["compute capability 9.0", "compute capability 9.0", "compute capability 8.0"]
    with RankPool(3, "gloo") as pool:
        for message in pool.run(_register_on, unlike, "powersgd"):
            assert "rank 2 computes with another kind of GPU, or with other settings, than rank 0" in message
            assert "compute capability 8.0 against compute capability 9.0" in message
        assert pool.run(_register_on, unlike, "bytegrad") == [""] * 3
        assert pool.run(_register_on, unlike[:1] * 3, "powersgd") == [""] * 3


def test_what_products_depend_on_is_compared() -> None:
    gpu = {"major": 9, "minor": 0, "multi_processor_count": 132}
    precision = torch.backends.cuda.matmul.fp32_precision

    def text(**other: Any) -> str:
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(**{**gpu, **other})):
            return arithmetic_of(torch.device("cuda", 0))

    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        same, others = text(), [text(major=8), text(minor=1), text(multi_processor_count=114)]
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        others.append(text())
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
    assert len({same, *others}) == 5
    assert arithmetic_of(torch.device("cpu")) == ""


# --- checkpoints that one rank alone has loaded ---


def _train(group: Any, algorithm: str, options: dict[str, Any], state: dict[str, Any] | None) -> bagua.Handle:
    ddp = DDP(perceptron(), process_group=group, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    if state is not None:
        handle.load_state_dict(state)
    take_steps(ddp, optimizer, range(3))
    return handle


def _load_on_one_rank(hosts: str, algorithm: str, options: dict[str, Any]) -> str:
    with emulated_hosts(hosts) as group:
        state = _train(group, algorithm, options, None).state_dict()
        _train(group, algorithm, options, state)  # on all ranks: no error
        return _message(
            RuntimeError,
            lambda: _train(group, algorithm, options, state if torch.distributed.get_rank() == 0 else None),
        )


@pytest.mark.parametrize("hosts", ["AA", "AB"])
def test_a_bucket_layout_that_one_rank_alone_has_loaded(rank_pools: Pools, hosts: str) -> None:
    for message in rank_pools[2].run(_load_on_one_rank, hosts, "bytegrad", {"hierarchical": False}):
        assert "bucket layouts differ" in message
        assert "Load the handle's state_dict on all ranks" in message
        # Whole layers apart, against the whole model.
        assert re.search(r"rank 0 is in bagua:reduce_bucket.*gradients [0-9-]+\|[0-9-|]", message)
        assert re.search(r"rank 1 in bagua:reduce_bucket.*gradients [0-9-]+\)", message)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False}),
        ("low_precision_decentralized", {"hierarchical": False}),
    ],
)
def test_a_step_that_one_rank_alone_has_loaded(rank_pools: Pools, algorithm: str, options: dict[str, Any]) -> None:
    for message in rank_pools[2].run(_load_on_one_rank, "AB", algorithm, options):
        assert re.search(r"at step \d and step \d", message), message
        assert "bucket layouts" not in message


@on_ranks(2)
def test_an_optimizer_of_other_steps_that_one_rank_alone_has_loaded() -> None:
    # A group of its own, which ends with the error.
    with emulated_hosts("AB") as group:
        ddp = DDP(perceptron(), process_group=group, **SMALL_BUCKETS)
        optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=0.01, warmup_steps=3)
        handle = bagua.register_comm_hook(ddp, "qadam", optimizer=optimizer)
        take_steps(ddp, optimizer, range(1))
        early = copy.deepcopy((handle.state_dict(), optimizer.state_dict()))
        take_steps(ddp, optimizer, range(4))
        if torch.distributed.get_rank() == 0:
            handle.load_state_dict(early[0])
            optimizer.load_state_dict(early[1])
        # Else rank 0 would send gradients, which the other takes for momenta.
        assert "bagua:check_agreement" in _message(RuntimeError, lambda: take_steps(ddp, optimizer, range(1)))
