"""One seed, many independent streams: a hash of (seed, epoch, sample) gives each sample its own random numbers."""

import torch

_MASK = 2**64 - 1


def mix(seed: int, *key: int) -> int:
    """A 32-bit seed from a seed and a key, by splitmix64's finaliser after each part (doi:10.1145/2660193.2660195).

    32 bits, because torch's CPU generator (a Mersenne twister) uses only the low 32 bits of a seed.
    """
    z = 0
    for part in (seed, *key):
        z = (z + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z & 0xFFFFFFFF


class seeded:
    """Within the block, torch's CPU generator runs from `seed`; afterwards it goes on where it was.

    `torch.default_generator.manual_seed` takes 1 us, `torch.manual_seed`, which visits every backend, over 100 us.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self.state)
