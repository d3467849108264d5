"""A tier on an imitation of Mooncake, whose master and nodes fail as often as a simulation says."""

from __future__ import annotations

import random

from kvtide.tier import MooncakeTier
from kvtide.tier.mooncake_client import TRANSFER_FAILED, UNREACHABLE
from tier.fake_mooncake import FakeStore


class FaultyMooncake:
    """A MooncakeTier, and what goes wrong in its store."""

    def __init__(self, chance: random.Random, limit_bytes: int, fault_share: float) -> None:
        self._chance = chance
        self.store = FakeStore(limit_bytes)
        self.tier = MooncakeTier("", open_client=self.store.open_client)
        self.limit_bytes = limit_bytes
        self._fault_share = fault_share

    @property
    def fault_share(self) -> float:
        """How often something fails."""
        return self._fault_share

    @fault_share.setter
    def fault_share(self, share: float) -> None:
        self._fault_share = share
        self._set()

    @property
    def used_bytes(self) -> int:
        """What the store's objects take."""
        return sum(map(len, self.store.objects.values()))

    def check(self) -> None:
        """The store keeps its limit."""
        assert self.used_bytes <= self.limit_bytes

    def left(self) -> list[str]:
        """Objects that are left."""
        return [*self.store.objects]

    def close(self) -> None:
        """Leaves the store."""
        self.tier.close()

    def harm(self) -> None:
        """Changes the weather, and an object: flips a bit, cuts it, loses it, or swaps two."""
        self._set()
        objects, chance = self.store.objects, self._chance
        if not objects or chance.random() >= 0.3:
            return
        name, other = chance.choice([*objects]), chance.choice([*objects])
        act = chance.choice(("flip", "cut", "lose", "swap"))
        if act == "lose":
            del objects[name]
        elif act == "swap":
            objects[name], objects[other] = objects[other], objects[name]
        elif act == "cut":
            del objects[name][chance.randrange(len(objects[name])) :]
        elif objects[name]:
            objects[name][chance.randrange(len(objects[name]))] ^= 1 << chance.randrange(8)

    def _set(self) -> None:
        """Master and nodes are away, or not, until this is called again."""
        store, chance, share = self.store, self._chance, self._fault_share
        store.is_master_away = chance.random() < share
        is_node_away = chance.random() < share
        store.node_code = chance.choice((UNREACHABLE, TRANSFER_FAILED)) if is_node_away else 0
        store.lost_bytes = int(chance.random() < share)
        store.busy_count = chance.randrange(12) if chance.random() < share else 0
