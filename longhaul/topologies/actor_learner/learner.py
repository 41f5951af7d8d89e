"""The `actors` topology: N actors collect experience, a learner on the mesh learns from it (IMPALA, Espeholt et al.
2018).

Where we differ: the staleness S of experience is bounded by construction (`staleness`); every random key comes from
(run, batch, place in it), never from an actor; the states of environments travel with the rollouts. So a run with S = 0
equals `fused` on a mesh of N devices, bit for bit if the compiled programs round alike. Threads, processes and killed
actors change no number.

Batches lie in shared memory in the learner's layout; it moves them without reading them. Where most of a state is
fixed (`Algorithm.fixed`), an update leaves the state before it as it was, so that a run can stop while it computes.

Several learners, one a process of a group (`longhaul launch`), each have an equal share of the actors. Their gradients
meet in the one mean over `data`, so they learn what one learner on a mesh of as many devices learns.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap, partition, process_group
from longhaul.runtime.batch_shards import part
from longhaul.runtime.shared_memory import Leaf
from longhaul.runtime.signals import AT_WORK
from longhaul.topologies import fused
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.actor_learner.actor_pool import ActorPool
from longhaul.topologies.actor_learner.shared_buffers import Shapes
from longhaul.topologies.staleness import Ticket
from longhaul.types import LEARNING, Algorithm, Key, Metrics, Params, Progress, PyTree, changing

Join = Callable[[Sequence[PyTree]], PyTree]
"""Rollouts of several actors joined along the batch axis."""


class Parted(NamedTuple):
    """Leaves of a pytree: those that an update changes, which travel, and those that are fixed."""

    structure: Any
    fixed: tuple[bool, ...]

    @property
    def left(self) -> bool:
        """True where an update leaves the state before it as it was: what changes is the smaller part of it."""
        return any(self.fixed)

    def split(self, tree: PyTree) -> tuple[list[Any], list[Any]]:
        """(leaves that change, fixed ones)."""
        pairs = list(zip(jax.tree.leaves(tree), self.fixed, strict=True))
        return [x for x, fixed in pairs if not fixed], [x for x, fixed in pairs if fixed]

    def join(self, changing: Sequence[Any], fixed: Sequence[Any]) -> PyTree:
        """Inverse of `split`."""
        moving, still = iter(changing), iter(fixed)
        return jax.tree.unflatten(self.structure, [next(still if each else moving) for each in self.fixed])


def parted(tree: PyTree, algorithm: Algorithm, *, shared: bool) -> Parted:
    """Parts of a State or a policy; nothing is fixed unless actors share these arrays with the learner."""
    fixed = algorithm.fixed(tree) if shared else changing(tree)
    return Parted(jax.tree.structure(tree), tuple(jax.tree.leaves(fixed)))


class CompiledActor(NamedTuple):
    """Rollout function of one actor, and the shapes of its results."""

    collect: Callable[..., tuple[Leaves, Leaves, Leaves]]  # a `Collect`; `context`: that of its environment, if any
    shapes: Shapes
    data: PyTree  # ShapeDtypeStructs of a rollout
    scores: Metrics  # of its scores
    shared: bool = False  # actors share the policy's fixed arrays with the learner
    program: jax.stages.Compiled | None = None  # where it is compiled ahead
    finishing: jax.stages.Compiled | None = None  # of the host's last step, likewise


class PinnedCarry(NamedTuple):
    """Carry of a pinned run: the environments' states, and the older weights that an exact resume needs."""

    carry: PyTree
    weights: tuple[np.ndarray, ...]  # bytes of the S versions before the newest, oldest first


# ------------------------------------------------------------------------------------------------- an actor's side


FINISHING = 2
"""Number folded into the key of a batch's place, for `Finish`; the program splits that key."""

Finish = Callable[[Params, Key, PyTree, Metrics], tuple[PyTree, Metrics]]
"""(policy, key, data, scores) as collected -> (data, scores) as delivered; NumPy arrays of the same shapes."""


def acting(
    collector_in: fused.CollectorIn,
    policy: Params,
    finish: Finish | None = None,
    held: tuple[Parted, Sequence[jax.Array]] | None = None,
    context: PyTree = (),
) -> CompiledActor:
    """Actor that runs a compiled collector with a policy of these shapes, in contexts of the shapes of `context`.
    `finish` is the host's last step, if any.

    `held`: parts of the policy and its fixed arrays, which an actor in this process shares with the learner; such an
    actor is compiled at once.
    """
    nothing = Parted(jax.tree.structure(policy), (False,) * len(jax.tree.leaves(policy)))
    parts, own = held or (nothing, ())
    version = jax.ShapeDtypeStruct((), jnp.int32)
    carry = jax.eval_shape(lambda context, key: collector_in(context).start(key), context, jax.random.key(0))
    _, data, scores = jax.eval_shape(
        lambda context, *args: collector_in(context).collect(*args), context, policy, carry, jax.random.key(0), version
    )

    @jax.jit
    def program(weights: Leaves, state: Leaves, key: jax.Array, where: tuple[Any, Any, Any], context: PyTree) -> Any:
        batch, place, version = where
        drawn = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), batch), place)
        key_data, _ = jax.random.split(drawn)  # the second is the learning key of a shard of `fused`
        speaker, before = tree(policy, weights), tree(carry, state)
        after, data, scores = collector_in(context).collect(speaker, before, key_data, version)
        return _raw_leaves(after), _raw_leaves(data), _raw_leaves(scores)

    key_size = jax.random.key_data(jax.random.key(0)).size

    def collect(
        weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int, context: PyTree = ()
    ) -> tuple[Leaves, Leaves, Leaves]:
        where = np.int32(ticket.batch), np.int32(ticket.place), np.int32(version)
        every = jax.tree.leaves(parts.join(weights, own))
        after, *results = jax.block_until_ready(run(every, list(state), key[:key_size], where, context))
        rollout, sums = ([np.asarray(x) for x in leaves] for leaves in results)
        if finish is not None:
            finishing_key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key[:key_size])), ticket.batch)
            finishing_key = jax.random.fold_in(jax.random.fold_in(finishing_key, ticket.place), FINISHING)
            finished = finish(tree(policy, every), finishing_key, tree(data, rollout), tree(scores, sums))
            rollout, sums = map(jax.tree.leaves, finished)
        return after, rollout, sums

    travelling = shapes(parts.split(policy)[0], carry, data, scores)
    if held is None:
        run: Callable[..., Any] = program
        return CompiledActor(collect, travelling, data, scores)
    like = jax.eval_shape(lambda: (_raw_leaves(_zeros(policy)), _raw_leaves(_zeros(carry))))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = program.lower(*like, jax.ShapeDtypeStruct((key_size,), jnp.uint32), (number,) * 3, ()).compile()
    run = compiled
    return CompiledActor(collect, travelling, data, scores, True, compiled)


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def key_of(key: np.ndarray, ticket: Ticket) -> Key:
    """Key of a ticket's rollout, from that of the run: the one with which `acting` collects."""
    key_size = jax.random.key_data(jax.random.key(0)).size
    own = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key[:key_size])), ticket.batch)
    return jax.random.split(jax.random.fold_in(own, ticket.place))[0]


def shapes(policy: PyTree, carry: PyTree, data: PyTree, scores: PyTree) -> Shapes:
    """Shapes of the arrays that travel, from those of the pytrees. NumPy leaves keep 64 bits; JAX would use 32."""

    def of(tree: PyTree) -> tuple[Leaf, ...]:
        leaves = jax.tree.leaves(tree)
        return tuple(_leaf(jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x) for x in leaves)

    return Shapes(of(policy), of(carry), of(data), of(scores))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw_leaves(tree: PyTree) -> list[Any]:
    """Leaves of a pytree, with keys as their data."""
    return [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(tree)]


def tree(shapes: PyTree, leaves: Leaves) -> PyTree:
    """Inverse of `_raw_leaves`."""
    likes, structure = jax.tree.flatten(shapes)
    pairs = zip(likes, leaves, strict=True)
    return jax.tree.unflatten(structure, [jax.random.wrap_key_data(x) if _is_key(like) else x for like, x in pairs])


def _leaf(shape: Any) -> Leaf:
    return Leaf(tuple(shape.shape), str(shape.dtype))


def process_places(actors: int) -> range:
    """Places of a batch that this process's actors fill; with several learners an equal share of all, in order."""
    share = actors // process_group.count()
    return range(share * process_group.index(), share * (process_group.index() + 1))


def placed(collect: Collect, first: int) -> Collect:
    """`collect` of a pool whose place 0 is place `first` of the batch: random keys come from places in the batch."""
    if first == 0:
        return collect

    def run(weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int) -> Any:
        return collect(weights, state, key, ticket._replace(place=first + ticket.place), version)

    return run


def entering(collector_in: fused.CollectorIn, actors: int) -> fused.Enter:
    """Initial carry of a run with `actors` actors: the states of this process's environments, NumPy arrays [N, ...].

    They equal the shards of `fused` on a mesh of N devices. Compiles once per shape of context.
    """

    def start(context: PyTree, key: Key, place: Any) -> PyTree:
        return collector_in(context).start(jax.random.fold_in(key, place))

    begin = jax.jit(lambda context, key, place: _raw_leaves(start(context, key, place)))

    def enter(key: Key, context: PyTree) -> PyTree:
        # Arrays of a mesh would have all its processes compute the same.
        words = jnp.asarray(np.asarray(jax.random.key_data(key)))
        own = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
        context = jax.tree.map(lambda x: x.addressable_data(0), context)
        leaves, structure = jax.tree.flatten(jax.eval_shape(start, context, own, 0))
        each = [jax.device_get(begin(context, own, np.int32(place))) for place in process_places(actors) if leaves]
        return jax.tree.unflatten(structure, [np.stack(parts) for parts in zip(*each)])

    return enter


def entered(progress: Progress, enter: fused.Enter, context: PyTree) -> Progress:
    """`fused.entered`, after which a pinned run still has its older weights."""
    begun = fused.entered(progress, enter, context)
    if not isinstance(progress.carry, PinnedCarry):
        return begun
    return begun._replace(carry=begun.carry._replace(weights=progress.carry.weights))


Entered = Callable[[Progress], tuple[Progress, int]]
"""Progress between two updates -> (progress in the context that is due, the update at which that ends)."""


def with_pinned_weights(enter: fused.Enter, pinned: int, algorithm: Algorithm) -> fused.Enter:
    """`enter` of a run that keeps `pinned` older weights; its carry is a PinnedCarry unless that is 0."""
    if not pinned:
        return enter

    def begin(key: Key, context: PyTree) -> PyTree:
        shapes = jax.eval_shape(lambda key: _raw_leaves(algorithm.policy(algorithm.init(key))), key)
        size = sum(_leaf(x).nbytes for x in shapes)
        return PinnedCarry(enter(key, context), tuple(np.zeros(size, np.uint8) for _ in range(pinned)))

    return begin


def joined_carry(carry: PyTree, mesh: Mesh) -> PyTree:
    """Carry of a checkpoint: with several learners the states of all their environments, as arrays of all processes."""
    if not mesh.is_multi_process:
        return carry
    copied = jax.tree.map(np.array, carry)  # the arrays of a CPU would be the actors' memory, which goes on to change
    if isinstance(copied, PinnedCarry):
        return PinnedCarry(_from_processes(copied.carry, mesh), meshes.everywhere(copied.weights, mesh))
    return _from_processes(copied, mesh)


def _layout(mesh: Mesh) -> NamedSharding:
    """Layout of arrays [actors, ...]: split over `data`. Where processes share parameters, each has the rows of its own
    actors alone, so over `fsdp`, too."""
    if mesh.is_multi_process and mesh.shape[meshes.FSDP] > 1:
        return NamedSharding(mesh, PartitionSpec((meshes.DATA, meshes.FSDP)))
    return meshes.sharded(mesh)


def _from_processes(tree: PyTree, mesh: Mesh) -> PyTree:
    """NumPy arrays [own, ...] of each process as arrays [all, ...]."""
    layout = _layout(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(layout, np.asarray(x)), tree)


def _own_rows(tree: PyTree) -> list[np.ndarray]:
    """This process's rows of arrays [all, ...]: the inverse of `_from_processes`."""

    def own(leaf: Any) -> np.ndarray:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return np.asarray(leaf)
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])

    return [own(leaf) for leaf in _raw_leaves(tree)]


# ---------------------------------------------------------------------------------------------- the learner's side


def compiled(
    algorithm: Algorithm, acting: CompiledActor, join: Join, progress: Progress, mesh: Mesh, *, actors: int
) -> jax.stages.Compiled:
    """Update of the learner for runs like `progress`, compiled ahead of time; donates the state if nothing is fixed.

    (state, fixed, key, updates, data, scores) -> (state, updates, metrics, weights). The state is a list of the leaves
    that change, `fixed` of the others (`Parted`). Data and scores are flat lists of [N, ...]; weights are bytes, or ()
    where parameters are split over devices: none of them shall hold them whole.
    """
    apart, parts = meshes.splits(mesh), parted(progress.state, algorithm, shared=acting.shared)

    def update(state: PyTree, key: Key, updates: jax.Array, data: Leaves, scores: Leaves) -> Any:
        drawn = jax.random.fold_in(jax.random.fold_in(key, updates), meshes.shard_index())
        _, key_learn = jax.random.split(drawn)
        rollouts = [tree(acting.data, [x[i] for x in data]) for i in range(actors // mesh.shape[meshes.DATA])]
        with jax.named_scope(LEARNING):
            state, metrics = algorithm.learn(state, join(rollouts), key_learn)
        reported = metrics | _reduce_scores(tree(acting.scores, scores), mesh)
        reported[fused.FINITE] = fused.is_finite((part(state)[0], metrics))
        weights = () if apart else _weights(algorithm, state, shared=acting.shared)
        return state, updates + 1, jax.tree.map(lambda x: x[None], reported), weights

    everywhere, split = fused.EVERYWHERE, PartitionSpec(meshes.DATA)
    state = fused.layout(progress).state
    specs = state, everywhere, everywhere, split, split
    results = state, everywhere, everywhere, everywhere
    inner = meshes.per_shard(update, mesh, specs, results)
    copies, layout = meshes.replicated(mesh), _layout(mesh)
    lies = (parts.split(partition.shardings(progress.state, mesh))[0], copies, copies, ()) if apart else None

    def program(changing: Leaves, fixed: Leaves, *rest: Any) -> Any:
        state, *outputs = inner(parts.join(changing, fixed), *rest)
        return parts.split(state)[0], *outputs

    flat = [
        [jax.ShapeDtypeStruct((actors, *leaf.shape), leaf.dtype, sharding=layout) for leaf in leaves]
        for leaves in (acting.shapes.data, acting.shapes.scores)
    ]
    begun = *parts.split(progress.state), progress.key, progress.updates
    donated = () if parts.left else 0
    lowered = jax.jit(program, donate_argnums=donated, out_shardings=lies).lower(*begun, *flat)
    return overlap.compiled(lowered, mesh)


def _reduce_scores(scores: Metrics, mesh: Mesh) -> Metrics:
    """Scores [n] of a shard's rollouts reduced over all shards: the maximum of "peak/", the sum of the others."""
    scores = {name: (jnp.max if name.startswith("peak/") else jnp.sum)(x, axis=0) for name, x in scores.items()}
    peaks = {name: meshes.max_over_data(scores.pop(name)) for name in list(scores) if name.startswith("peak/")}
    sums = mesh.shape[meshes.DATA] * meshes.mean_over_data(jnp.stack(list(scores.values())))
    return dict(zip(scores, sums)) | peaks


def _bytes(leaves: list[jax.Array]) -> jax.Array:
    """Arrays concatenated as bytes, or as 4-byte words if all items have 4 bytes."""
    unit = jnp.uint32 if all(x.dtype.itemsize == 4 for x in leaves) else jnp.uint8
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, unit).ravel() for x in leaves])


def _weights(algorithm: Algorithm, state: PyTree, *, shared: bool) -> jax.Array:
    """Bytes of what travels of a state's policy."""
    policy = algorithm.policy(state)
    return _bytes(_raw_leaves(parted(policy, algorithm, shared=shared).split(policy)[0]))


def weights_of(algorithm: Algorithm, mesh: Mesh, *, shared: bool = False) -> Callable[[PyTree], np.ndarray]:
    """state -> bytes of its policy, as `ActorPool` publishes them. Parts on several devices are joined on the host;
    where other processes have some, a device holds one array whole at a time."""
    if meshes.splits(mesh):
        leaves = jax.jit(lambda state: _raw_leaves(algorithm.policy(state)))
        whole = jax.jit(lambda leaf: leaf, out_shardings=meshes.replicated(mesh))

        def joined(leaf: jax.Array) -> np.ndarray:
            parts = whole(leaf).addressable_data(0) if mesh.is_multi_process else leaf
            return np.asarray(parts).reshape(-1).view(np.uint8)

        return lambda state: np.concatenate([joined(leaf) for leaf in leaves(state)])
    flat = jax.jit(lambda state: _weights(algorithm, state, shared=shared))
    return lambda state: _on_host(flat(state))


def _on_host(weights: jax.Array) -> np.ndarray:
    return np.asarray(weights.addressable_data(0)).view(np.uint8)


def actors(
    update: jax.stages.Compiled, mesh: Mesh, pool: ActorPool, progress: Progress,
    publish: Callable[[PyTree], np.ndarray], *, updates: int, leaving: Callable[[], bool] = lambda: False,
    parts: Parted | None = None, enter: Entered | None = None,
) -> Iterator[tuple[Progress, int, Metrics]]:  # fmt: skip
    """Iterator over updates from `progress` to `updates` finished ones: (progress, 1, metrics), as `fused.fused`.

    `progress` and its carry are donated when the iterator advances: save them before. Once `leaving`, it ends and waits
    for no batch; nor, longer than `GRACE`, for an update that leaves the state as it was. `parts` of the state are
    those that `update` was compiled for; none: nothing is fixed. No actor acts while `enter` changes the context.
    """
    enter = enter or (lambda progress: (progress, updates))
    progress, until = enter(progress)
    parts = parts or Parted(jax.tree.structure(progress.state), (False,) * len(jax.tree.leaves(progress.state)))
    pinned = pool.rule.pinned
    held = progress.carry if pinned else PinnedCarry(progress.carry, ())
    structure = jax.tree.structure(held.carry)
    layout = meshes.sharded(mesh)
    done = int(progress.updates)
    weights = [*(np.asarray(meshes.local_part(x) if isinstance(x, jax.Array) else x) for x in held.weights)]
    weights.append(publish(progress.state))
    pool.open(done, np.asarray(jax.random.key_data(progress.key)), weights, _own_rows(held.carry), until)
    state, key, count = progress.state, progress.key, progress.updates
    meter = _Meter(pool)
    carry: Any = progress.carry
    while done < updates:
        if done == until:
            begun, until = enter(Progress(state, carry, key, count))
            pool.enter(_own_rows(begun.carry.carry if pinned else begun.carry), until)
        # Several learners meet in each update, so all leave after the same one, as the run's loop asks them to.
        batch = pool.take((lambda: False) if mesh.is_multi_process else leaving)
        if batch is None:
            return
        if mesh.is_multi_process:
            data, scores = _from_processes((batch.data, batch.scores), mesh)
        else:
            data, scores = jax.device_put((batch.data, batch.scores), layout)
        changing, fixed = parts.split(state)
        del state  # its arrays may be donated
        learn = functools.partial(update, changing, fixed, key, count, data, scores)
        if parts.left and not mesh.is_multi_process:
            learnt = unless(leaving, lambda: jax.block_until_ready(learn()))  # noqa: B023  called at once
            if learnt is None:
                return
        else:
            learnt = learn()
        changing, count, rows, new_weights = learnt
        del learn, learnt
        state = parts.join(changing, fixed)
        versions = [head.version for head in batch.heads]
        # This waits until the update has finished.
        pool.learnt(publish(state) if meshes.splits(mesh) else _on_host(new_weights))
        timings = meter.read(done, versions)
        done += 1
        carry = jax.tree.unflatten(structure, pool.carry())
        carry = PinnedCarry(carry, pool.past()) if pinned else carry
        yield Progress(state, carry, key, count), 1, rows | timings


GRACE, LOOK = 5.0, 0.1
"""Seconds that an update may still compute once its run leaves, and between two looks whether it does."""


def unless(leaving: Callable[[], bool], work: Callable[[], Any]) -> Any:
    """Result of `work`, which a thread computes; None where it is not there `GRACE` seconds after `leaving`."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=f"{AT_WORK}'s learner", daemon=True)
    thread.start()
    last = None
    while not wait([outcome], LOOK).done:
        if last is None and leaving():
            last = time.monotonic() + GRACE
        if last is not None and time.monotonic() >= last:
            atexit.register(thread.join)  # in a user's own program; the command ends without the interpreter
            return None
    thread.join()
    return outcome.result()


class _Meter:
    """Work of the actors between two updates, as metrics."""

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        self._before = self._now()

    def _now(self) -> np.ndarray:
        acted, waited = self._pool.worked()
        return np.array([time.perf_counter(), self._pool.waited, acted, waited])

    def read(self, update: int, versions: Sequence[int]) -> dict[str, Any]:
        now = self._now()
        wall, learner, acted, waited = now - self._before
        self._before = now
        age = [update - version for version in versions]
        row = {
            "staleness_mean": sum(age) / len(age),
            "staleness_max": max(age),
            "queue": self._pool.queue,
            "learner_wait": learner / max(wall, 1e-9),
            "actor_wait": waited / max(acted + waited, 1e-9),
            "restarts": self._pool.restarts,
        }
        return {f"actors/{name}": np.array([value], np.float32) for name, value in row.items()}
