"""Which pairs of tokens are held out: a seeded rule, evaluated on the fly.

No table is kept: at 8192 tokens a kind there are 67 million pairs.
"""

from __future__ import annotations

from jaxtyping import Bool, Int
from torch import Tensor

_BITS = 32
_MASK = (1 << _BITS) - 1
# Odd multipliers below 2**31, so that a product with a 32-bit word never overflows int64.
_MULTIPLIERS = (0x45D9F3B, 0x119DE1F3)


def held_out(
    first: Int[Tensor, "*shape"] | int,
    second: Int[Tensor, "*shape"] | int,
    fraction: float,
    seed: int,
) -> Bool[Tensor, "*shape"] | bool:
    """True where the pair (first, second) is held out: about `fraction` of all pairs.

    The seed, then each token, is stirred into a 32-bit word, which is compared with the fraction.
    Depends on nothing but its arguments: not on Python's hash, the device or the batch. Takes
    tensors, or two plain integers.
    """
    word = stir(stir(stir(seed & _MASK) ^ first) ^ second)
    return word < int(fraction * 2**_BITS)


def stir(word: Int[Tensor, "*shape"] | int) -> Int[Tensor, "*shape"] | int:
    """Mix the bits of 32-bit words held in int64: one to one, every output bit from every input.

    Two rounds of xor-shift and odd multiplication, the shape of MurmurHash3's finaliser.
    """
    for multiplier in _MULTIPLIERS:
        word = (word ^ (word >> 16)) * multiplier & _MASK
    return word ^ (word >> 16)
