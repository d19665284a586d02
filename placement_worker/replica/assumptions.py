"""Claims in flight: allocations that were requested of placement and that the feed does not contain yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

# {class: amount} of one claim on one provider.
Share = dict[str, int]

NOTHING: Mapping[str, int] = {}


class Assumptions:
    """The amounts by key and provider, and their sums by provider. Every method that changes amounts returns the sums
    that have changed.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, dict[str, Share]] = {}
        self._sums: dict[str, Share] = {}
        # Provider -> {key: generation and feed number at which that key's share there is counted by the feed}.
        self._awaited: dict[str, dict[str, tuple[int, int]]] = {}
        self._doubtful: set[str] = set()  # keys that were in flight when another history began

    def keys(self) -> Iterator[str]:
        """The keys that have assumed amounts."""
        return iter(self._by_key)

    def providers(self) -> list[str]:
        """The providers that have assumed amounts."""
        return list(self._sums)

    def providers_of(self, key: str) -> list[str]:
        """The providers of which the key assumes amounts."""
        return list(self._by_key.get(key, ()))

    def amount(self, uuid: str, resource_class: str) -> int:
        """The assumed amount of one class of one provider, over all keys."""
        sums = self._sums.get(uuid)
        return 0 if sums is None else sums.get(resource_class, 0)

    def sums_of(self, uuid: str) -> Mapping[str, int]:
        """The assumed amounts of one provider, by class."""
        return self._sums.get(uuid, NOTHING)

    def add(self, key: str, allocations: Mapping[str, Mapping[str, int]]) -> Mapping[str, Sequence[str]]:
        """Add a key. The caller has dropped an earlier key of this name."""
        assert key not in self._by_key, key
        if allocations:
            self._by_key[key] = {uuid: dict(share) for uuid, share in allocations.items()}
        for uuid, share in allocations.items():
            sums = self._sums.setdefault(uuid, {})
            for name, amount in share.items():
                sums[name] = sums.get(name, 0) + amount
        return {uuid: list(share) for uuid, share in allocations.items()}

    def drop(self, key: str) -> Mapping[str, Sequence[str]]:
        """Drop a key with all its amounts."""
        return self._drop(key, self.providers_of(key))

    def settle(
        self, key: str, generations: Mapping[str, int], reached: Sequence[str], sequence: int
    ) -> Mapping[str, Sequence[str]]:
        """Record that the claim of this key has succeeded. Its shares on the providers in `reached` are dropped now,
        the others when their provider reaches the given generation or a snapshot this feed number. All are dropped if
        another history has begun since the key was added: the claim may have been forgotten with the former one, and
        then nothing comes that counts it.
        """
        if key in self._doubtful:
            return self.drop(key)
        touched = self._drop(key, reached)
        for uuid in self.providers_of(key):
            self._awaited.setdefault(uuid, {})[key] = (generations[uuid], sequence)
        return touched

    def doubt(self) -> None:
        """Record that another history begins: what is in flight may have been claimed in the former one."""
        self._doubtful.update(self._by_key)

    def is_awaited(self, uuid: str) -> bool:
        """Whether a settled share waits for changes of this provider."""
        return uuid in self._awaited

    def awaited(self) -> list[str]:
        """The providers for whose changes settled shares wait."""
        return list(self._awaited)

    def reached(self, uuid: str, generation: int | None, snapshot: int = -1) -> dict[str, list[str]]:
        """Record that the provider has this generation (None: it was removed), and drop the settled shares that waited
        for it.

        snapshot: the feed number of the snapshot that contains the provider. The snapshot counts all claims up to this
        number, even if the generation is lower than the awaited one because the provider was deleted and created again.
        """
        touched: dict[str, list[str]] = {}
        for key, (wanted, sequence) in list(self._awaited.get(uuid, {}).items()):
            if generation is None or generation >= wanted or sequence <= snapshot:
                for provider, names in self._drop(key, [uuid]).items():
                    touched.setdefault(provider, []).extend(names)
        return touched

    def _drop(self, key: str, providers: Sequence[str]) -> dict[str, list[str]]:
        shares = self._by_key.get(key)
        touched: dict[str, list[str]] = {}
        if shares is None:
            return touched
        for uuid in providers:
            share = shares.pop(uuid)
            touched[uuid] = list(share)
            self._subtract(uuid, share)
            waiting = self._awaited.get(uuid)
            if waiting is not None and waiting.pop(key, None) is not None and not waiting:
                del self._awaited[uuid]
        if not shares:
            del self._by_key[key]
            self._doubtful.discard(key)
        return touched

    def _subtract(self, uuid: str, share: Share) -> None:
        sums = self._sums[uuid]
        for name, amount in share.items():
            left = sums[name] - amount
            assert left >= 0, (uuid, name, left)
            if left:
                sums[name] = left
            else:
                del sums[name]
        if not sums:
            del self._sums[uuid]
