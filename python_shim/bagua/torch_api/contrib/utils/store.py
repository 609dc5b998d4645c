# SPDX-License-Identifier: Apache-2.0
"""What a key-value store can do, and several stores as one.

Definition: Bagua 0.9. Values are bytes.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence


class Store:
    """The base class of all stores: a mapping from keys to values that outlives the process that filled it."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value, in place of any other with this key."""
        raise NotImplementedError

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, None where there is none."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return how many keys there are."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove all keys."""
        raise NotImplementedError

    def mset(self, mapping: Mapping[str, bytes]) -> None:
        """Store several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of several keys, None for those that are not there."""
        return [self.get(key) for key in keys]

    def status(self) -> bool:
        """Return True if the store can be reached."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Let go of what this process holds of the store."""
        raise NotImplementedError


def crc16(key: str) -> int:
    """Return the CRC-16 of a key, which Redis clusters use as well.

    >>> hex(crc16("123456789"))
    '0x31c3'
    """
    return binascii.crc_hqx(key.encode(), 0)


class ClusterStore(Store):
    """Several stores as one: each key lives in one of them.

    Args:
        stores: one or more; in the same order in every process.
        hash_fn: a number for a key, by default its CRC-16; modulo the number of stores it says which.
    """

    def __init__(self, stores: Sequence[Store], hash_fn: Callable[[str], int] | None = None) -> None:
        if not stores:
            raise ValueError("ClusterStore: one store or more is expected, got none")
        self.stores = list(stores)
        self.num_stores = len(self.stores)
        self.hash_fn = hash_fn or crc16

    def route(self, key: str) -> Store:
        """Return the store of a key."""
        return self.stores[self._index(key)]

    def _index(self, key: str) -> int:
        return self.hash_fn(key) % self.num_stores if self.num_stores > 1 else 0

    def _by_store(self, keys: Iterable[str]) -> dict[int, list[str]]:
        routed: dict[int, list[str]] = {}
        for key in keys:
            routed.setdefault(self._index(key), []).append(key)
        return routed

    def set(self, key: str, value: bytes) -> None:
        """Store a value in the store of its key."""
        self.route(key).set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, None where there is none."""
        return self.route(key).get(key)

    def num_keys(self) -> int:
        """Return how many keys there are in all stores."""
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        """Remove all keys from all stores."""
        for store in self.stores:
            store.clear()

    def mset(self, mapping: Mapping[str, bytes]) -> None:
        """Store several values, with one request per store."""
        for index, keys in self._by_store(mapping).items():
            self.stores[index].mset({key: mapping[key] for key in keys})

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of several keys, with one request per store."""
        found: dict[str, bytes | None] = {}
        for index, routed in self._by_store(keys).items():
            found.update(zip(routed, self.stores[index].mget(routed), strict=True))
        return [found[key] for key in keys]

    def status(self) -> bool:
        """Return True if all stores can be reached."""
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        """Let go of all stores."""
        for store in self.stores:
            store.shutdown()
