# SPDX-License-Identifier: Apache-2.0
"""Stores, cache and cached dataset of bagua.torch_api.contrib."""

import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bagua.torch_api.contrib import CachedDataset, CacheLoader
from bagua.torch_api.contrib.utils.redis_store import RedisStore
from bagua.torch_api.contrib.utils.sqlite_store import SqliteStore
from bagua.torch_api.contrib.utils.store import ClusterStore, Store, crc16
from torch.utils.data import DataLoader, Dataset

MIB = 1 << 20


class _Redis:
    """The part of redis.Redis in use, over servers that are dictionaries."""

    servers: dict[tuple[str, int], dict[str, bytes]]

    def __init__(self, host: str, port: int) -> None:
        self._data = self.servers.setdefault((host, port), {})

    def ping(self) -> bool:
        return True

    def set(self, key: str, value: bytes) -> None:
        self._data[key] = value

    def get(self, key: str) -> bytes | None:
        return self._data.get(key)

    def mset(self, mapping: Mapping[str, bytes]) -> None:
        assert mapping, "Redis refuses an MSET of nothing"
        self._data.update(mapping)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        assert keys, "Redis refuses an MGET of nothing"
        return [self._data.get(key) for key in keys]

    def dbsize(self) -> int:
        return len(self._data)

    def flushdb(self) -> None:
        self._data.clear()

    def close(self) -> None:
        self._data = {}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], dict[str, bytes]]:
    """Redis servers by address."""
    _Redis.servers = {}
    monkeypatch.setitem(sys.modules, "redis", SimpleNamespace(Redis=_Redis))
    return _Redis.servers


HOSTS = [{"host": "10.0.0.1", "port": 7000}, {"host": "10.0.0.2", "port": "7000"}]


@pytest.fixture(params=["sqlite", "cluster of sqlite", "redis", "cluster of redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, servers: Any) -> Iterator[Store]:
    made: Store
    if request.param == "sqlite":
        made = SqliteStore(tmp_path)
    elif request.param == "redis":
        made = RedisStore(HOSTS[:1])
    elif request.param == "cluster of redis":
        made = RedisStore(HOSTS, cluster_mode=True)
    else:
        made = ClusterStore([SqliteStore(tmp_path / str(index)) for index in range(3)])
    yield made
    made.shutdown()


def test_store_returns_what_was_stored(store: Store) -> None:
    assert store.status()
    assert store.num_keys() == 0
    assert store.get("missing") is None
    store.set("one", b"1")
    store.mset({str(number): bytes([number]) for number in range(100)})
    store.set("7", b"changed")
    assert store.num_keys() == 101
    assert store.get("one") == b"1"
    assert store.mget(["7", "missing", "99", "7"]) == [b"changed", None, b"c", b"changed"]
    assert store.mget([]) == []
    store.mset({})
    assert store.num_keys() == 101
    store.clear()
    assert store.num_keys() == 0
    assert store.get("7") is None


def test_store_survives_pickling(store: Store) -> None:
    store.set("key", b"value")
    assert pickle.loads(pickle.dumps(store)).get("key") == b"value"


def test_cluster_sends_each_key_to_one_store(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / str(index)) for index in range(3)]
    cluster = ClusterStore(stores, hash_fn=lambda key: len(key) + 3)
    cluster.mset({"a": b"1", "b": b"2", "cc": b"3"})
    assert [one.num_keys() for one in stores] == [0, 2, 1]
    assert cluster.route("dddd") is stores[1]
    assert crc16("123456789") == 0x31C3  # the check value of CRC-16/XMODEM
    with pytest.raises(ValueError, match="one store or more"):
        ClusterStore([])


def test_redis_without_cluster_mode_uses_the_server_of_this_host(
    servers: dict[tuple[str, int], dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GROUP_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NODE_RANK", "3")
    RedisStore(HOSTS, cluster_mode=False).set("key", b"value")
    assert servers == {("10.0.0.2", 7000): {"key": b"value"}}


def test_redis_that_is_missing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"pip install redis.*sqlite"):
        CacheLoader("redis", hosts=HOSTS)
    with pytest.raises(ValueError, match=r"hosts is to name Redis servers that are running.*got None"):
        CacheLoader(backend="redis")


def test_file_is_kept_where_a_folder_is_given_and_goes_with_the_store_where_not(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "new" / "folder").set("key", b"value")
    assert SqliteStore(tmp_path / "new" / "folder").get("key") == b"value"
    temporary = SqliteStore()
    folder = temporary._folder
    assert folder.stat().st_mode & 0o077 == 0, "only this user may write what is unpickled"
    temporary.set("key", b"value")
    assert SqliteStore().get("key") is None
    del temporary
    assert not folder.exists()


def test_full_store_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteStore(tmp_path, capacity_per_node=2 * MIB)
    store.set("fits", bytes(MIB))
    with caplog.at_level(logging.WARNING, "bagua"):
        store.mset({"does not": bytes(MIB)})
        store.set("neither does", bytes(MIB))
        store.set("small", b"fits")
    assert store.mget(["fits", "does not", "neither does", "small"]) == [bytes(MIB), None, None, b"fits"]
    assert len([one for one in caplog.records if "nothing more is stored" in one.message]) == 1
    with pytest.raises(ValueError, match="capacity_per_node is to be 1048576 bytes or more, got 5"):
        SqliteStore(tmp_path, capacity_per_node=5)


def test_store_serves_threads(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(50):
                store.set(f"{number}-{index}", str(index).encode())
                assert store.get(f"{number}-{index}") == str(index).encode()
        except BaseException as error:  # to be seen by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.num_keys() == 200


def test_loader_loads_each_key_once() -> None:
    loader = CacheLoader(dataset_name="numbers")
    loaded: list[int] = []

    def load(key: int) -> list[int]:
        loaded.append(key)
        return [key]

    assert [loader.get(key, load) for key in (1, 2, 1, 2, 1)] == [[1], [2], [1], [2], [1]]
    assert loaded == [1, 2]
    # A copy: what a user does with a value does not come back.
    loader.get(1, load).append(99)
    assert loader.get(1, load) == [1]
    assert CacheLoader().get(None, lambda key: None) is None


def test_none_is_a_value() -> None:
    loader = CacheLoader()
    assert loader.get("key", lambda key: None) is None
    assert loader.get("key", lambda key: "loaded again") is None


def test_loaders_with_different_names_share_a_store(tmp_path: Path) -> None:
    one, other = (CacheLoader(dataset_name=name, path=tmp_path) for name in ("one", "other"))
    assert one.get(0, lambda key: "one") == "one"
    assert other.get(0, lambda key: "other") == "other"
    assert one.get(0, lambda key: "again") == "one"
    assert one.num_keys() == other.num_keys() == 2


def test_values_are_written_together(tmp_path: Path) -> None:
    loader = CacheLoader(writer_buffer_size=3, path=tmp_path)
    store = SqliteStore(tmp_path)
    counts = []
    for key in range(7):
        loader.get(key, str)
        counts.append(store.num_keys())
    assert counts == [0, 0, 3, 3, 3, 6, 6]
    # What has not been written is there all the same, and is written when the loader goes.
    assert loader.get(6, lambda key: "loaded again") == "6"
    del loader
    assert store.num_keys() == 7


def test_wrong_arguments_of_the_loader() -> None:
    with pytest.raises(ValueError, match="one of sqlite, redis, got 'memcached'"):
        CacheLoader("memcached")
    with pytest.raises(ValueError, match="writer_buffer_size is to be 1 or more, got 0"):
        CacheLoader(writer_buffer_size=0)


class _Slow(Dataset[Any]):
    """Leaves a file for each time a sample is made."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size

    def __getitem__(self, item: int) -> list[Any]:
        (self._folder / f"{item}-{len(list(self._folder.glob(f'{item}-*')))}").touch()
        return [item, [item / 2]]

    def __len__(self) -> int:
        return self._size


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_made_once_by_all_workers_together(tmp_path: Path, workers: int) -> None:
    # Not a multiple of what is written at once: workers write the rest when they end.
    dataset = _Slow(tmp_path, 51)
    cached = CachedDataset(dataset, dataset_name="slow")
    assert len(cached) == 51
    loader = DataLoader(cached, batch_size=None, num_workers=workers)
    for _ in range(3):
        assert list(loader) == [[index, [index / 2]] for index in range(51)]
    assert len(os.listdir(tmp_path)) == 51
    assert cached.cache_loader.num_keys() == 51
