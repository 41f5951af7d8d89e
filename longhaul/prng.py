"""Random numbers inside compiled loops: the bits of `jax.random`, in one fused kernel; and shuffling without a sort.

JAX lowers Threefry (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) to a rolled loop on the CPU,
which costs a dozen small kernels for every draw inside a `lax.scan`. Here the twenty rounds are written out, so that
XLA fuses them with the consumer of the bits. The stream is that of `jax.random.bits` with a partitionable Threefry key
(a test compares them bit for bit), so keys may be shared with JAX.

`jax.random.permutation` sorts: at 262,144 rows that is 123 ms of 600 ms of an update on the CPU. `permutation` is a
Feistel network over the mixed radix n = a x b (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) and
takes well under 1 ms, because every index is mapped on its own. Rounds alternate l = (l + F(r)) mod a and
r = (r + F(l)) mod b, each a bijection for any F. Minibatches need rows spread evenly and independently from epoch to
epoch, not secrecy; a test checks positions and pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.types import Key

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@functools.partial(jax.jit, inline=True)
def threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: counters (high, low), uint32 of any shape, under key data uint32 [2, ...].

    It is traced once for each shape, and then copied into each program that draws: tracing its rounds takes long.
    """
    k0, k1 = key[0], key[1]
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x, y = high + k0, low + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << rotation) | (y >> (32 - rotation))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _counters(shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"{size} random numbers in one draw; the bound is 2**32 - 1: draw them in parts")
    return jnp.arange(size, dtype=jnp.uint32).reshape(shape)


def bits(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Random bits uint32 [*shape]; equal to `jax.random.bits(key, shape)`."""
    low = _counters(shape)
    x, y = threefry(jax.random.key_data(key), jnp.zeros_like(low), low)
    return x ^ y


def uniform(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Numbers float32 [*shape] in [0, 1), with 23 random bits each; equal to `jax.random.uniform(key, shape)`."""
    return _to_unit(bits(key, shape))


def _to_unit(drawn: jax.Array) -> jax.Array:
    """Numbers float32 in [0, 1) of the upper 23 of 32 random bits: these are the mantissa of a number in [1, 2)."""
    return jax.lax.bitcast_convert_type((drawn >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0


def normal(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal numbers float32 [*shape] by the inverse error function (|x| < 5.6)."""
    u = uniform(key, shape)
    low = -1.0 + 2.0**-24  # never -1, where the inverse is infinite
    return math.sqrt(2.0) * jax.lax.erf_inv(jnp.maximum(2.0 * u - 1.0, low))


def normals(keys: Key, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Standard normal numbers float32 [*shape] of each of the keys [N]; equal to `jax.random.normal(key, shape)`.

    They are one draw: separately each is a program of its own, which takes about a second to compile.
    """
    sizes = [math.prod(shape) for shape in shapes]
    each = zip(jax.random.key_data(keys), sizes, strict=True)
    data = jnp.concatenate([jnp.broadcast_to(words[:, None], (2, size)) for words, size in each], axis=1)
    low = jnp.concatenate([_counters((size,)) for size in sizes])
    x, y = threefry(data, jnp.zeros_like(low), low)
    u = _to_unit(x ^ y)
    least = np.nextafter(np.float32(-1.0), np.float32(0.0))
    drawn = math.sqrt(2.0) * jax.lax.erf_inv(jnp.maximum(u * (np.float32(1.0) - least) + least, least))
    ends = np.cumsum(sizes)[:-1].tolist()
    return [part.reshape(shape) for part, shape in zip(jnp.split(drawn, ends), shapes, strict=True)]


def split(key: Key, count: int) -> Key:
    """Keys [count]; equal to `jax.random.split(key, count)`."""
    low = _counters((count,))
    x, y = threefry(jax.random.key_data(key), jnp.zeros_like(low), low)
    return jax.random.wrap_key_data(jnp.stack([x, y], axis=-1), impl="threefry2x32")


ROUNDS = 6
"""Rounds of the Feistel network."""

SMALLEST_FACTOR = 16
"""Smallest radix of the Feistel network; with smaller ones the order is not random enough."""


def _mix(x: jax.Array) -> jax.Array:
    """A 32-bit finaliser: every input bit changes every output bit with probability near one half."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def permutation(key: Key, n: int) -> jax.Array:
    """Permutation int32 [n] of 0 .. n-1, drawn by `key`.

    A small n, or one without a divisor of at least 16 near its root (a prime, for example), is sorted by random bits.
    """
    b = next(b for b in range(math.isqrt(n), 0, -1) if n % b == 0)  # the largest divisor that is at most sqrt(n)
    if b < SMALLEST_FACTOR:
        return jnp.argsort(bits(key, (n,))).astype(jnp.int32)
    a = n // b
    seeds = bits(key, (ROUNDS,))
    index = jnp.arange(n, dtype=jnp.uint32)
    left, right = index // b, index % b
    for i in range(0, ROUNDS, 2):
        left = (left + _mix(right * jnp.uint32(0x9E3779B1) ^ seeds[i]) % a) % a
        right = (right + _mix(left * jnp.uint32(0x85EBCA77) ^ seeds[i + 1]) % b) % b
    return (left * b + right).astype(jnp.int32)
