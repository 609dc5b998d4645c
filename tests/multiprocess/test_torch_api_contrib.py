# SPDX-License-Identifier: Apache-2.0
"""What bagua.torch_api.contrib does between processes: SyncBatchNorm, and stores that ranks share."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.contrib import CachedDataset, LoadBalancingDistributedSampler, SyncBatchNorm
from bagua.torch_api.contrib.sync_batchnorm import convert_sync_batchnorm
from bagua.torch_api.contrib.utils.sqlite_store import SqliteStore
from ranks import RankPool
from torch import Tensor, nn

# float64. A sum of n <= 180 values of up to 110 is off by at most n x 110 x 2^-53 = 2.2e-12. Normalised, multiplied by
# weights of up to 3 and, for gradients, added up n times: 1.2e-9 if all roundings went one way. n in the place of n - 1
# would be off by more than 1e-3.
CLOSE = {"rtol": 2e-9, "atol": 2e-9}


def _batches(shape: tuple[int, ...], sizes: list[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Of each rank; with a mean that is large against the spread, which a difference of squares would not survive."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(size, *shape, generator=generator, dtype=torch.float64) + 50).to(dtype) for size in sizes]


def _outcome(layer: nn.Module, batch: Tensor, factors: Tensor) -> dict[str, Tensor]:
    batch = batch.clone().requires_grad_()
    output = layer(batch)
    (output * factors).sum().backward()
    assert batch.grad is not None
    result = {"output": output.detach(), "input gradient": batch.grad}
    result |= {f"gradient of {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return result | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def _against_one_process(shape: tuple[int, ...], sizes: list[int], options: dict[str, Any]) -> None:
    """Two steps here, on a part of the batch, and in a plain BatchNorm on all of it."""
    rank = dist.get_rank()
    plain_class = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)]
    plain = plain_class(shape[0], dtype=torch.float64, **options)
    torch.manual_seed(0)
    for p in plain.parameters():
        nn.init.normal_(p)
    layer = convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(layer, SyncBatchNorm)
    batches = _batches(shape, sizes)
    factors = [torch.sin(batch * 7) for batch in batches]
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    for step in range(2):
        layer.zero_grad()
        plain.zero_grad()
        actual = _outcome(layer, batches[rank] * (step + 1), factors[rank])
        expected = _outcome(plain, torch.cat(batches) * (step + 1), torch.cat(factors))
        for name in actual:
            if name.startswith("gradient of"):
                # Of this rank's part; DDP takes their mean.
                dist.all_reduce(actual[name])
            elif name in ("output", "input gradient"):
                expected[name] = expected[name][mine]
            torch.testing.assert_close(
                actual[name], expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert actual.keys() == expected.keys()
    layer.eval()
    plain.eval()
    torch.testing.assert_close(layer(batches[rank]), plain(batches[rank]), **CLOSE)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None, "eps": 1e-3}, {"affine": False}, {"track_running_stats": False}],
    ids=["default", "cumulative", "without affine", "without statistics"],
)
@pytest.mark.parametrize("shape", [(5,), (3, 15), (4, 3, 5), (2, 3, 2, 2)], ids=str)
def test_sync_batchnorm_equals_batchnorm_on_the_whole_batch(
    rank_pools: dict[int, RankPool], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    rank_pools[2].run(_against_one_process, shape, [4, 4], options)


@pytest.mark.parametrize("sizes", [[1], [6], [2, 7], [0, 5], [1, 3, 8], [4, 0, 0, 2]], ids=str)
def test_sync_batchnorm_with_batches_of_different_sizes(rank_pools: dict[int, RankPool], sizes: list[int]) -> None:
    rank_pools[len(sizes)].run(_against_one_process, (4, 3, 5), sizes, {})


def _same_statistics_everywhere() -> None:
    size = dist.get_world_size()
    layer = SyncBatchNorm(3)
    layer(_batches((3, 4), [5] * size, torch.float32)[dist.get_rank()])
    for statistic in (layer.running_mean, layer.running_var):
        everywhere: list[Any] = [None] * size
        dist.all_gather_object(everywhere, statistic)
        assert all(torch.equal(one, everywhere[0]) for one in everywhere)


def test_running_statistics_are_bitwise_the_same_on_all_ranks(peers: RankPool) -> None:
    peers.run(_same_statistics_everywhere)


def _half_precision(dtype: torch.dtype) -> None:
    batch = _batches((3, 15), [4] * dist.get_world_size(), dtype)[dist.get_rank()]
    layer, wide = SyncBatchNorm(3), SyncBatchNorm(3)
    output, expected = layer(batch), wide(batch.float())
    assert output.dtype == dtype
    # Computed in float32, rounded once.
    assert torch.equal(output, expected.to(dtype))
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer.running_mean is not None
    assert wide.running_mean is not None
    assert torch.equal(layer.running_mean, wide.running_mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_normalised_in_float32(peers: RankPool, dtype: torch.dtype) -> None:
    peers.run(_half_precision, dtype)


def _wrong_input() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(ValueError, match="at least 2D input"):
        SyncBatchNorm(3)(torch.ones(3))
    with pytest.raises(ValueError, match=f"more than 1 value per channel .* got 1 on all {size} ranks together"):
        SyncBatchNorm(3)(torch.ones(1 if rank == 0 else 0, 3))


def test_single_value_per_channel_raises_on_every_rank(peers: RankPool) -> None:
    peers.run(_wrong_input)


def _conversion() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), nn.Linear(2, 2)
    )
    model[2].eval()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    layers = [one for one in model.modules() if isinstance(one, nn.SyncBatchNorm)]
    assert [type(one) for one in layers] == [SyncBatchNorm, SyncBatchNorm]
    assert [one.training for one in layers] == [True, False]
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == names
    again = SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(again, nn.Sequential)
    assert isinstance(again[1], SyncBatchNorm)


def test_conversion_keeps_parameters_names_and_mode(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[1].run(_conversion)


def _shared_file(folder: str) -> None:
    """All ranks open a new file at once and write to it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(5):
        dist.barrier()
        store = SqliteStore(f"{folder}/{turn}")
        for index in range(40):
            store.mset({f"{rank}-{index}-{part}": bytes([rank, index, part]) for part in range(5)})
        dist.barrier()
        assert store.num_keys() == size * 200
        for other in range(size):
            assert store.get(f"{other}-39-4") == bytes([other, 39, 4])
        store.shutdown()


def test_ranks_write_to_one_file_at_once(peers: RankPool, tmp_path: object) -> None:
    peers.run(_shared_file, str(tmp_path))


def _shared_cache(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    made: list[int] = []

    class Dataset:
        def __getitem__(self, item: int) -> int:
            made.append(item)
            return 10 * item

        def __len__(self) -> int:
            return 4 * size

    cached = CachedDataset(Dataset(), path=folder, writer_buffer_size=1)
    for index in range(rank, 4 * size, size):
        assert cached[index] == 10 * index
    dist.barrier()
    assert [cached[index] for index in range(4 * size)] == [10 * index for index in range(4 * size)]
    assert made == list(range(rank, 4 * size, size))


def test_ranks_share_the_samples_that_others_made(peers: RankPool, tmp_path: object) -> None:
    peers.run(_shared_cache, str(tmp_path))


def _sampler_defaults() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = list(range(3 * size))
    sampler = LoadBalancingDistributedSampler(lengths, lambda length: length, shuffle=False)
    assert list(sampler) == [rank, size + rank, 2 * size + rank]


def test_sampler_takes_rank_and_number_of_ranks_from_the_default_group(ranks: RankPool) -> None:
    ranks.run(_sampler_defaults)
