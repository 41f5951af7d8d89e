"""The replay against a model in NumPy that keeps whole transitions; its chances, its memory, its place in a program."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import replay, sum_tree
from longhaul.replay import Cursor, Sizes
from longhaul.spaces import Discrete
from longhaul.sum_tree import FANOUT
from longhaul.types import Rollout, Spec, Successors
from tests.helpers.quick import quick

T, B, ROWS, N_STEP, GAMMA, INTERVAL = 4, 3, 24, 3, 0.9, 3
ACTION = jax.ShapeDtypeStruct((), jnp.uint8)


def spec(interval: int | None = INTERVAL) -> Spec:
    seen = {"near": jax.ShapeDtypeStruct((2,), jnp.float32), "tile": jax.ShapeDtypeStruct((), jnp.uint8)}
    return Spec(seen, Discrete(5), None, interval, None)


class Step(NamedTuple):
    """A transition as a model keeps it, of numbers that stand for observations."""

    seen: int
    action: int
    reward: float
    ending: str  # "on", "terminated", "truncated", "nobody"
    led_to: int


class World:
    """Columns of episodes in which every observation is a number of its own."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.count = 0
        self.now = [self._new() for _ in range(B)]
        self.since = np.zeros(B, int)  # steps since a column's last truncation
        self.waits = np.zeros(B, bool)

    def _new(self) -> int:
        self.count = self.count % 60_000 + 1  # by then who had it is long gone, and bfloat16 tells no more apart
        return self.count

    def restart(self) -> None:
        """Begins anew without a word, as other scenarios do."""
        self.now = [self._new() for _ in range(B)]

    def rollout(self) -> tuple[Rollout, list[list[Step]]]:
        """(a rollout, the same as steps [T][B])."""
        rows: list[list[Step]] = []
        slots = math.ceil(T / INTERVAL)
        kept, used = np.zeros((slots, B), int), np.zeros(B, int)
        for _ in range(T):
            row = []
            for b in range(B):
                ending = self.draw.choice(["on", "on", "on", "terminated", "truncated", "nobody"])
                self.since[b] += 1
                if ending == "truncated" and self.since[b] < INTERVAL:
                    ending = "on"
                # Nobody plays after an end only, until the next episode begins.
                ending = (
                    "nobody" if self.waits[b] and self.draw.random() < 0.5 else "on" if ending == "nobody" else ending
                )
                self.waits[b] = ending in ("terminated", "nobody")
                seen, led_to = self.now[b], self._new()
                self.now[b] = led_to if ending == "on" else self._new()
                if ending == "truncated":
                    self.since[b] = 0
                    kept[used[b], b], used[b] = led_to, used[b] + 1
                row.append(Step(seen, int(self.draw.integers(5)), float(self.draw.normal()), ending, led_to))
            rows.append(row)
        field = lambda name: np.array([[getattr(step, name) for step in row] for row in rows])  # noqa: E731
        ending = field("ending")
        data = Rollout(
            observe(field("seen")), field("action").astype(np.int32), field("reward").astype(np.float32),
            ending == "terminated", ending == "truncated", ending != "nobody", (),
            Successors(observe(np.array(self.now)), observe(kept)), (), jnp.int32(0),
        )  # fmt: skip
        return jax.tree.map(jnp.asarray, data), rows


def observe(number: Any) -> dict[str, np.ndarray]:
    number = np.asarray(number)
    near = np.stack([number % 251, number // 251], axis=-1).astype(np.float32)
    return {"near": near, "tile": (number % 256).astype(np.uint8)}


def number(observation: dict[str, Any]) -> np.ndarray:
    """The inverse of `observe`."""
    near = np.asarray(observation["near"]).astype(int)
    found = near[..., 0] + 251 * near[..., 1]
    assert np.array_equal(found % 256, observation["tile"])
    return found


class Model:
    """The last ROWS - 1 rows, whole."""

    def __init__(self) -> None:
        self.rows: list[list[Step]] = []
        self.places: dict[int, tuple[int, int]] = {}  # of each observation, row and column

    def add(self, rows: list[list[Step]]) -> None:
        for b in range(B):
            if self.rows and self.rows[-1][b].ending == "on" and self.rows[-1][b].led_to != rows[0][b].seen:
                self.rows[-1][b] = self.rows[-1][b]._replace(ending="nobody")
        self.rows = [*self.rows, *[list(row) for row in rows]][-(ROWS - 1) :]
        self.places = {step.seen: (t, b) for t, row in enumerate(self.rows) for b, step in enumerate(row)}

    def transition(self, seen: int) -> tuple[float, float, int, bool] | None:
        """(discounted rewards, discount, where they led, whether that counts) of n steps from one; None of nobody."""
        t, b = self.places[seen]
        if self.rows[t][b].ending == "nobody":
            return None
        total, factor = 0.0, 1.0
        for row in self.rows[t : t + N_STEP]:
            step = row[b]
            if step.ending == "nobody":
                return total, factor, step.seen, True
            total, factor = total + factor * step.reward, factor * GAMMA
            if step.ending != "on":
                break
        return total, 0.0 if step.ending == "terminated" else factor, step.led_to, step.ending != "terminated"


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=pytest.mark.slow, id="even"), pytest.param(True, id="prioritised")],
)
def store(request: pytest.FixtureRequest) -> replay.Replay:
    made = replay.replay(
        spec(), ACTION, Sizes(1, B, T), ROWS * B, n_step=N_STEP, half=True, prioritised=request.param
    )  # fmt: skip
    assert made.rows == ROWS
    jitted = {name: quick(getattr(made, name), static_argnums=i) for name, i in
              (("add", ()), ("sample", 3), ("prioritise", ()))}  # fmt: skip
    return made._replace(**jitted)


def empty(store: replay.Replay) -> Any:
    return jax.tree.map(lambda x: x[0], store.start()), replay.start_cursor()


def test_samples_are_what_a_model_keeps(store: replay.Replay) -> None:
    assert compare(store, 40) > 10_000


@pytest.mark.slow
def test_a_million_operations_are_those_of_a_model(store: replay.Replay) -> None:
    assert compare(store, 4_000 if isinstance(store.start().tree, tuple) else 2_000) > 1_000_000


def compare(store: replay.Replay, rollouts: int) -> int:
    """Number of operations equal to the model's: steps added, steps sampled, priorities set.

    Ends of every kind, wraps, columns that begin anew without a word, n-step returns. Samples of 256, and priorities
    of as many, after each rollout.
    """
    (ring, cursor), world, model = empty(store), World(0), Model()
    set_, prioritised = {}, isinstance(ring.tree, sum_tree.Tree)
    for i in range(rollouts):
        if i % 7 == 6:
            world.restart()
        data, rows = world.rollout()
        ring, cursor = store.add(ring, cursor, data)
        model.add(rows)
        batch = jax.device_get(store.sample(ring, cursor, jax.random.key(i), 256, 1.0))
        total, factor = jax.device_get(replay.discounted(batch, GAMMA))
        seen, led_to = number(batch.observation), number(batch.successor)
        alive = model.places.keys()
        assert set(seen.tolist()) <= alive
        if i > 3 and not prioritised:
            assert len(set(seen.tolist())) > 0.8 * len([s for r in model.rows for s in r if s.ending != "nobody"])
        wanted = [model.transition(n) for n in seen.tolist()]
        assert ((batch.weight > 0) == [each is not None for each in wanted]).all()
        there = batch.weight > 0
        sums, factors, goals, counts = (np.array(x) for x in zip(*(w for w in wanted if w is not None), strict=True))
        np.testing.assert_allclose((total[there], factor[there]), (sums, factors), rtol=1e-5, atol=1e-5)
        assert np.all((led_to[there] == goals) | ~counts)
        if prioritised:
            leaves = np.asarray(ring.tree.leaves)[batch.chosen]
            set_ = {n: p for n, p in set_.items() if n in alive}
            expected = [set_.get(n, float(ring.greatest)) for n in seen.tolist()]
            np.testing.assert_allclose(leaves, expected, rtol=1e-6)
            least = min(leaves)
            np.testing.assert_allclose(batch.weight, least / leaves, rtol=1e-5)
            new = np.random.default_rng(i).random(256).astype(np.float32)
            new = new[np.unique(seen, return_index=True, return_inverse=True)[2]]  # one for each step
            ring = store.prioritise(ring, batch, new)
            set_ |= dict(zip(seen.tolist(), new.tolist(), strict=True))
            for below, above in zip((ring.tree.leaves, *ring.tree.sums), ring.tree.sums):
                np.testing.assert_allclose(np.asarray(below).reshape(-1, FANOUT).sum(1), above[: len(below) // FANOUT],
                                           rtol=1e-5)  # fmt: skip
    return rollouts * (T * B + 256 * (1 + prioritised))


def test_ten_million_steps_of_64_floats_are_below_3_gib_and_stay_in_place() -> None:
    """Compiled, not run: what a program of adding, sampling and new priorities takes beside the ring it is given."""
    columns, steps = 1024, 8
    wide = Spec(jax.ShapeDtypeStruct((64,), jnp.float32), Discrete(5), None, 500, None)
    made = replay.replay(wide, ACTION, Sizes(1, columns, steps), 10_000_000, n_step=3, half=True, prioritised=True)
    assert made.rows * columns >= 10_000_000

    def update(ring: Any, cursor: Cursor, data: Rollout, key: jax.Array) -> Any:
        ring, cursor = made.add(ring, cursor, data)

        def once(i: jax.Array, ring: Any) -> Any:
            batch = made.sample(ring, cursor, jax.random.fold_in(key, i), 256, 0.4)
            seen = jnp.sum(batch.observation, axis=-1) + jnp.sum(batch.successor, axis=-1)
            return made.prioritise(ring, batch, jnp.abs(seen))

        return jax.lax.fori_loop(0, 4, once, ring), cursor

    ring, cursor = jax.eval_shape(lambda: (jax.tree.map(lambda x: x[0], made.start()), replay.start_cursor()))
    seen = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    flag = jax.ShapeDtypeStruct((steps, columns), bool)
    action, version = jax.ShapeDtypeStruct((steps, columns), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    data = Rollout(
        seen((steps, columns, 64)), action, seen((steps, columns)), flag, flag, flag, (),
        Successors(seen((columns, 64)), seen((1, columns, 64))), (), version,
    )  # fmt: skip
    program = jax.jit(update, donate_argnums=0).lower(ring, cursor, data, jax.eval_shape(lambda: jax.random.key(0)))
    memory = program.compile().memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring))
    assert held < 1.5 * 2**30 and memory.argument_size_in_bytes < 3 * 2**30
    assert memory.alias_size_in_bytes >= held  # the ring comes back where it was
    assert memory.temp_size_in_bytes < 0.01 * held  # and no copy of it is made on the way


def test_a_replay_beyond_int32_is_refused() -> None:
    with pytest.raises(ValueError, match="a replay of 8589934592 steps is 8589934592 a device; it must be at most"):
        replay.rows_of(2**33, Sizes(1, 4, 2))
