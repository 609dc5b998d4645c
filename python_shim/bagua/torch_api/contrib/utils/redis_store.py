# SPDX-License-Identifier: Apache-2.0
"""A store on Redis servers that are there already, through the package `redis`.

Definition: Bagua 0.9, which also starts servers by itself; here none is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua.torch_api.contrib.utils.store import ClusterStore, Store
from bagua.torch_api.env import get_node_rank


class RedisStore(ClusterStore):
    """Keys and values on Redis servers.

    Args:
        hosts: the servers, such as `[{"host": "192.168.1.1", "port": 7000}]`; the same list in every process.
        cluster_mode: whether the keys are spread over all servers. Otherwise this process uses one of them, by the
            number of its host (`bagua.torch_api.env.get_node_rank`).
        capacity_per_node: accepted as in the original, where it limits servers that it starts; how much memory yours
            may take is said in their configuration (`maxmemory`, with a `maxmemory-policy` that evicts).

    Raises:
        ValueError: no `hosts`.
        ImportError: the package `redis` is not installed.
        redis.exceptions.ConnectionError: a server cannot be reached.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = 107_374_182_400,
    ) -> None:
        if not hosts:
            raise ValueError(
                'RedisStore: hosts is to name Redis servers that are running, such as [{"host": "127.0.0.1", "port": '
                f'6379}}], got {hosts!r}. bagua starts no server; backend="sqlite" of CacheLoader needs none'
            )
        self.hosts = [dict(host) for host in hosts]
        self.cluster_mode = cluster_mode
        self.capacity_per_node = capacity_per_node
        used = self.hosts if cluster_mode else [self.hosts[get_node_rank() % len(self.hosts)]]
        super().__init__([_Server(host["host"], int(host["port"])) for host in used])


class _Server(Store):
    """One Redis server."""

    def __init__(self, host: str, port: int) -> None:
        self._address = {"host": host, "port": port}
        self._client = _connect(host, port)
        self._client.ping()

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._client.get(key)
        return value

    def num_keys(self) -> int:
        return int(self._client.dbsize())

    def clear(self) -> None:
        self._client.flushdb()

    def mset(self, mapping: Mapping[str, bytes]) -> None:
        if mapping:
            self._client.mset(dict(mapping))

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        values: list[bytes | None] = self._client.mget(list(keys)) if keys else []
        return values

    def status(self) -> bool:
        return bool(self._client.ping())

    def shutdown(self) -> None:
        self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        return self._address

    def __setstate__(self, address: dict[str, Any]) -> None:
        self._address = address
        self._client = _connect(**address)


def _connect(host: str, port: int) -> Any:
    try:
        import redis  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            'RedisStore needs the package redis: `pip install redis`, or CacheLoader\'s backend="sqlite" without it'
        ) from error
    return redis.Redis(host=host, port=port)
