# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of bagua.torch_api."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from ranks import RankPool
from torch import nn

Parts = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def _parts(seed: int) -> Parts:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5)


def _train(parts: Parts, steps: range) -> None:
    model, optimizer, scheduler = parts
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def _state(parts: Parts) -> list[torch.Tensor]:
    model, optimizer, scheduler = parts
    rate = torch.tensor(scheduler.get_last_lr())
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *moments, rate]


def _resume(folder: str) -> None:
    """Every rank loads what rank 0 saved, and goes on to the same bits."""
    whole = _parts(0)
    _train(whole, range(4))
    half = _parts(0)
    _train(half, range(2))
    save_checkpoint(1, folder, half[0])
    save_checkpoint(2, folder, *half)
    resumed = _parts(1 + dist.get_rank())
    assert load_checkpoint(folder, *resumed) == 2
    _train(resumed, range(2, 4))
    for actual, expected in zip(_state(resumed), _state(whole), strict=True):
        assert torch.equal(actual, expected)
    # The layout that the original's tools know.
    files = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
    assert files == {
        "latest_checkpointed_iteration.txt",
        "iter_0000001/mp_rank_00_model_states.pt",
        "iter_0000002/mp_rank_00_model_states.pt",
    }
    assert Path(folder, "latest_checkpointed_iteration.txt").read_text() == "2"
    saved = torch.load(Path(folder, "iter_0000002/mp_rank_00_model_states.pt"))
    assert saved.keys() == {"iteration", "model", "optimizer", "lr_scheduler"}


def test_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_resume, str(tmp_path))


def test_checkpoint_needs_no_process_group(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    _resume_alone(tmp_path)


def _resume_alone(folder: Path) -> None:
    parts, other = _parts(0), _parts(1)
    _train(parts, range(1))
    save_checkpoint(7, folder, *parts)
    assert load_checkpoint(folder, *other) == 7
    for actual, expected in zip(_state(other), _state(parts), strict=True):
        assert torch.equal(actual, expected)


def test_no_checkpoint_is_iteration_zero_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = _parts(0)
    before = _state(parts)
    with caplog.at_level(logging.WARNING, "bagua"):
        assert load_checkpoint(tmp_path / "nowhere", *parts) == 0
    assert "no checkpoint in" in caplog.text
    assert all(torch.equal(one, other) for one, other in zip(_state(parts), before, strict=True))


def test_wrong_files_and_arguments_are_named(tmp_path: Path) -> None:
    model, optimizer, _ = _parts(0)
    with pytest.raises(ValueError, match="iteration is to be 0 or more, got -1"):
        save_checkpoint(-1, tmp_path, model)
    save_checkpoint(3, tmp_path, model)
    with pytest.raises(KeyError, match="the checkpoint of iteration 3 has no optimizer"):
        load_checkpoint(tmp_path, model, optimizer)
    smaller = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_checkpoint(tmp_path, smaller)
    assert load_checkpoint(tmp_path, smaller, strict=False) == 3
    assert torch.equal(smaller[0].weight, model[0].weight)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ValueError, match="is to hold the number of an iteration, got 'release'"):
        load_checkpoint(tmp_path, model)


def test_interrupted_saving_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = _parts(0)
    save_checkpoint(1, tmp_path, model)

    def fail(state: object, path: Path) -> None:
        path.write_bytes(b"half a file")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(1, tmp_path, model)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(2, tmp_path, model)
    assert load_checkpoint(tmp_path, _parts(1)[0]) == 1


def _failure_on_one_rank(folder: str) -> None:
    rank = dist.get_rank()
    model, _, _ = _parts(0)
    blocked = os.path.join(folder, "a file")
    Path(blocked).touch()
    if rank == 0:
        with pytest.raises(OSError, match="a file"):
            save_checkpoint(1, blocked, model)
    else:
        with pytest.raises(RuntimeError, match=r"save_checkpoint failed on rank 0: .*a file"):
            save_checkpoint(1, blocked, model)
    # Rank 1 does not see the folder of the others.
    save_checkpoint(5, os.path.join(folder, "0"), model)
    with pytest.raises(RuntimeError, match=r"different iterations in .*: \[5, 0.*\] \(by rank, 0 for none\)"):
        load_checkpoint(os.path.join(folder, "1" if rank == 1 else "0"), model)
    # Nobody is left behind in a collective.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()


def test_failure_on_one_rank_is_raised_on_all(peers: RankPool, tmp_path: Path) -> None:
    peers.run(_failure_on_one_rank, str(tmp_path))
