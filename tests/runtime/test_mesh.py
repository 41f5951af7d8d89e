"""The mesh: its size, its layouts, and where shards meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError


def test_the_mesh_takes_the_first_devices_or_all():
    assert meshes.make_mesh().size == len(jax.devices()) == 4
    mesh = meshes.make_mesh(3)
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert mesh.devices.shape == (3, 1, 1)
    assert list(mesh.devices.flat) == jax.devices()[:3]


def test_parts_of_the_parameters_lie_side_by_side():
    """And so in one process, whose devices follow each other."""
    mesh = meshes.make_mesh(2, 2)
    assert mesh.devices[:, 0].tolist() == [jax.devices()[:2], jax.devices()[2:]]
    assert meshes.make_mesh(model=4).devices.shape == (1, 1, 4)
    assert meshes.make_mesh(model=3).devices.shape == (1, 1, 3)
    for data, model in ((3, 2), (1, 5), (0, 2)):
        with pytest.raises(ValueError, match=f"--mesh data={data},model={model}, but this machine has 4 device"):
            meshes.make_mesh(data, model)
    with pytest.raises(ValueError, match=r"model=0; it must be at least 1"):
        meshes.make_mesh(1, 0)


def test_devices_that_share_worlds_and_parameters_are_one_shard():
    mesh = meshes.make_mesh(2, 2, fsdp=True)
    assert mesh.devices[0].tolist() == meshes.make_mesh(2, 2).devices[:, 0].tolist()
    found = meshes.columns({"worlds": np.zeros((6, 3)), "odd": np.zeros(5), "one": np.zeros(())}, mesh)
    assert {name: each.spec for name, each in found.items()} == {
        "worlds": PartitionSpec(("data", "fsdp")), "odd": PartitionSpec("data"), "one": PartitionSpec("data"),
    }  # fmt: skip
    assert meshes.splits(mesh)
    assert not meshes.splits(meshes.make_mesh(4))


@pytest.mark.parametrize("data", [0, -1, 5])
def test_impossible_sizes_are_named_with_the_bound(data):
    with pytest.raises(ValueError, match=rf"data={data}, but this machine has 4 device\(s\); give 1 to 4"):
        meshes.make_mesh(data)


def test_each_shard_has_its_part_and_its_number_and_they_meet_in_the_mean():
    mesh = meshes.make_mesh(4)

    def shard(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert x.shape == (2,)
        tree = meshes.mean_over_data({"mean": jnp.mean(x) * scale})
        return x + 100.0 * meshes.shard_index(), tree["mean"]

    run = jax.jit(
        meshes.per_shard(
            shard, mesh, (PartitionSpec("data"), PartitionSpec()), (PartitionSpec("data"), PartitionSpec())
        )
    )
    parts, mean = run(jnp.arange(8.0), jnp.float32(2.0))
    np.testing.assert_array_equal(parts, np.arange(8.0) + 100.0 * np.repeat(np.arange(4), 2))
    assert mean == 7.0
    assert meshes.identity((parts, mean)) == (parts, mean)


def test_a_compiler_that_dies_is_refused(monkeypatch):
    """Only where it would: several devices, and arrays without elements."""
    bodies, points = (lambda: {"muscles": jnp.zeros((4, 0))}), (lambda: {"x": jnp.zeros(4)})
    monkeypatch.setattr(jax, "__version__", "0.11.1")
    meshes.check_compiler(bodies, meshes.make_mesh(2))
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    meshes.check_compiler(points, meshes.make_mesh(2))
    meshes.check_compiler(bodies, meshes.make_mesh(1))
    with pytest.raises(RunError, match=r"JAX 0.11.2 crashes on 2 devices .* pip install 'jax!=0.11.2', or --mesh"):
        meshes.check_compiler(bodies, meshes.make_mesh(2))


def test_split_arrays_are_gathered_on_devices_and_on_the_host():
    mesh = meshes.make_mesh(2, 2)
    x = np.arange(24.0).reshape(4, 6)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "model")))
    np.testing.assert_array_equal(meshes.local_part(split), x)
    (whole,) = meshes.gathered([split], mesh)
    assert whole.is_fully_replicated
    np.testing.assert_array_equal(meshes.local_part(whole), x)
    assert meshes.gathered(whole, mesh) is whole


def test_layouts_split_the_leading_axis_or_copy():
    mesh = meshes.make_mesh(2)
    x = np.arange(12.0).reshape(4, 3)
    split, copies = (jax.device_put(x, layout(mesh)) for layout in (meshes.sharded, meshes.replicated))
    assert [s.data.shape for s in split.addressable_shards] == [(2, 3)] * 2
    np.testing.assert_array_equal(split.addressable_shards[1].data, x[2:])
    assert [s.data.shape for s in copies.addressable_shards] == [(4, 3)] * 2
