"""The sums of every parameter that the servers of a pool answered: a version's weights are the same on all of them."""

from collections.abc import Mapping


class WeightSums:
    """Sums of the newest version's weights, as the first server that loaded it computed them."""

    def __init__(self) -> None:
        self._name = ""
        self._sums: Mapping[str, str] = {}

    def differing(self, name: str, sums: Mapping[str, str]) -> list[str]:
        """Parameters of which a server has other bytes than the first one; the first one's are kept.

        Those that only one of two servers has are of servers that divide the model differently.
        """
        if self._name != name:
            self._name, self._sums = name, dict(sums)
        return sorted(one for one in sums.keys() & self._sums.keys() if sums[one] != self._sums[one])
