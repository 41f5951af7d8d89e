"""Parameters of HackMatrix's own trainer: read as its network computes, and refused where anything is wrong."""

from __future__ import annotations

import itertools
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import actor_critic as algorithms_actor_critic
from longhaul.cli import main
from longhaul.envs.hackmatrix.environment import Game, hackmatrix
from longhaul.networks import actor_critic
from longhaul.training import legacy_params
from longhaul.training.legacy_params import LegacyError

INPUTS, ACTIONS = 1545, 28

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def game() -> Game:
    return hackmatrix(64)


def arrays(width: int, depth: int, seed: int = 0) -> Arrays:
    """A network of that trainer by its names: hidden layers, then the policy's, then the value's."""
    rng = np.random.default_rng(seed)
    sizes = [INPUTS] + [width] * depth
    shapes = [*itertools.pairwise(sizes), (width, ACTIONS), (width, 1)]
    made: Arrays = {}
    for i, (rows, columns) in enumerate(shapes):
        kernel = rng.normal(size=(rows, columns)) / np.sqrt(rows)
        made[f"params.Dense_{i}.kernel"] = kernel.astype(np.float32)
        made[f"params.Dense_{i}.bias"] = (0.1 * rng.normal(size=columns)).astype(np.float32)
    return made


def forward(made: Arrays, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits, value) as the trainer's network has them, in float64."""
    depth = len(made) // 2 - 2

    def dense(i: int, x: np.ndarray) -> np.ndarray:
        return x @ made[f"params.Dense_{i}.kernel"].astype(np.float64) + made[f"params.Dense_{i}.bias"]

    for i in range(depth):
        x = np.maximum(dense(i, x), 0)
    return dense(depth, x), dense(depth + 1, x)[..., 0]


def save(path: Path, made: Arrays) -> Path:
    np.savez(path, **made)
    return path


@pytest.fixture(scope="module")
def seen(game: Game) -> Any:
    """Observations of 48 games at the beginning of a stage, each with its own board and stocks."""

    def one(key: jax.Array) -> Any:
        words = jax.random.bits(key, (6,))
        stocks = {"credits": words[3] % 60, "energy": words[3] // 64 % 12, "siphons": words[4] % 4}
        state = game.reset(key)[0]._replace(
            stage=1 + (words[1] % 7).astype(jnp.int32), programs=words[2] >> 9, col=(words[0] % 6).astype(jnp.int32),
            **{name: value.astype(jnp.int32) for name, value in stocks.items()},
        )  # fmt: skip
        state = game.advance(state, words[4:])
        e = state.enemies
        alive = jnp.arange(20) < words[5] % 5
        here = e._replace(
            alive=alive, row=jnp.arange(20) % 6, col=jnp.arange(20) // 4, hp=alive + 1, kind=jnp.arange(20) % 4
        )
        return game._see(state._replace(enemies=here))

    return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 48))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "depth"), [(256, 2), (1, 1), (33, 3), (8, 5)])
def test_our_network_gives_what_theirs_gives(width: int, depth: int, game: Game, seen: Any, tmp_path: Path) -> None:
    made = arrays(width, depth)
    config, policy = legacy_params.load(save(tmp_path / "params_40.npz", made), game.spec)
    assert (config.network.hidden_dim, config.network.num_layers) == (width, depth)
    logits, value, _ = algorithms_actor_critic.network(game.spec, config).apply(policy, (), seen)
    assert game.spec.expand is not None
    x = np.asarray(game.spec.expand(seen.observation), np.float64)
    assert x.shape == (48, INPUTS)
    assert len(np.unique(x, axis=0)) == 48
    expected = forward(made, x)
    np.testing.assert_allclose(logits, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, expected[1], rtol=0, atol=1e-5)


def test_it_counts_as_many_parameters_as_theirs(game: Game, tmp_path: Path) -> None:
    _, policy = legacy_params.load(save(tmp_path / "final_params.npz", arrays(256, 2)), game.spec)
    assert actor_critic.count(policy.params) == 469_021


def test_other_kinds_of_float_and_names_without_their_prefix_are_read(game: Game, tmp_path: Path) -> None:
    made = arrays(4, 1)
    plain = legacy_params.load(save(tmp_path / "a.npz", made), game.spec)
    other = {name.removeprefix("params."): np.asfortranarray(x.astype(np.float64)) for name, x in made.items()}
    np.savez_compressed(tmp_path / "b.npz", **other)
    again = legacy_params.load(tmp_path / "b.npz", game.spec)
    assert plain[0] == again[0]
    jax.tree.map(np.testing.assert_array_equal, plain[1], again[1])


def tree(made: Arrays) -> dict[str, Any]:
    """The network as that trainer's library nests it."""
    nested: dict[str, Any] = {}
    for name, array in made.items():
        *_, layer, part = name.split(".")
        nested.setdefault(layer, {})[part] = array
    return {"params": nested}


def pickled(path: Path, params: Any, **others: Any) -> Path:
    """A checkpoint as that trainer wrote it: parameters and optimiser of JAX, metrics, numbers."""
    import optax

    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4))
    state = optimiser.init(jax.tree.map(jnp.asarray, params))
    about = {"step": 40, "opt_state": state, "metrics": {"train/loss": jnp.float32(1)}, "last_logged_step": np.int64(3)}
    path.write_bytes(pickle.dumps({**about, "params": params} | others))
    return path


@pytest.mark.parametrize("kind", ["numpy", "jax", "frozen", "bare"])
def test_a_pickled_checkpoint_holds_what_the_archive_beside_it_holds(kind: str, game: Game, tmp_path: Path) -> None:
    made = arrays(8, 2)
    wanted = legacy_params.load(save(tmp_path / "params_40.npz", made), game.spec)
    params: Any = jax.tree.map(jnp.asarray, tree(made)) if kind == "jax" else tree(made)
    path = tmp_path / "checkpoint_40.pkl"
    if kind == "frozen":
        frozen_dict = pytest.importorskip("flax.core.frozen_dict")
        path.write_bytes(pickle.dumps({"params": frozen_dict.freeze(params)}))
    elif kind == "bare":
        path.write_bytes(pickle.dumps(params["params"], protocol=2))
    else:
        pickled(path, params)
    found = legacy_params.load(path, game.spec)
    assert found[0] == wanted[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], wanted[1])


class Own:
    """An object of a class, which no parameters need."""


PICKLED: dict[str, tuple[Any, str]] = {
    "a program": (
        {"params": tree({}), "metrics": [Own()]},
        ".Own, which no parameters need and which is never run",
    ),
    "a call": ({"params": {"Dense_0": len}}, "asks for builtins.len, which no parameters need and which is never run"),
    "no tree": ([1, 2], "holds no params; give a checkpoint_STEP.pkl"),
    "another name": ({"params": {"Conv_0": {"kernel": np.zeros(3)}}}, "holds 'Conv_0.kernel'; expected are Dense_0"),
    "no arrays": ({"params": {"Dense_0": {"kernel": 3}}}, "Dense_0.kernel is of kind object; numbers of float16"),
    "another shape": (tree(arrays(4, 2) | {"params.Dense_1.bias": np.zeros(5, np.float32)}), "is (5,); (4,) is needed"),
    "not finite": (tree({"params.Dense_0.bias": np.array([np.nan])}), "holds numbers that are not finite"),
    "a deep tree": ({"params": {"Dense_0": {"kernel": {"kernel": np.zeros(3)}}}}, "Dense_0.kernel is of kind object"),
}


@pytest.mark.parametrize("case", PICKLED)
def test_a_bad_pickle_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    document, phrase = PICKLED[case]
    path = tmp_path / "checkpoint_40.pkl"
    path.write_bytes(pickle.dumps(document))
    with pytest.raises(LegacyError) as caught:
        legacy_params.read(path, INPUTS, ACTIONS)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert phrase in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_pickle_is_refused(share: float, tmp_path: Path) -> None:
    path = pickled(tmp_path / "checkpoint_40.pkl", tree(arrays(4, 2)))
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(LegacyError, match="holds no parameters: it is no usable pickle"):
        legacy_params.read(path, INPUTS, ACTIONS)


def test_of_a_folder_the_final_or_the_newest_parameters_are_taken(tmp_path: Path) -> None:
    for name in ("params_9.npz", "params_100.npz", "checkpoint_200.pkl", "params_x.npz"):
        (tmp_path / name).touch()
    assert legacy_params.find(tmp_path).name == "params_100.npz"
    (tmp_path / "final_params.npz").touch()
    assert legacy_params.find(tmp_path).name == "final_params.npz"
    assert legacy_params.find(tmp_path / "params_9.npz").name == "params_9.npz"
    (tmp_path / "empty").mkdir()
    with pytest.raises(LegacyError, match=r"empty holds no params_STEP\.npz"):
        legacy_params.find(tmp_path / "empty")


# ------------------------------------------------------------------------------------------------------------- refused


def without(name: str) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **{n: x for n, x in arrays(4, 2).items() if n != name})


def with_(**changes: Any) -> Callable[[Path], None]:
    """The network with other arrays, by names in which "__" stands for a dot."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda path: np.savez(path, **(arrays(4, 2) | named))


def with_one(value: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        made = arrays(4, 2)
        made["params.Dense_1.kernel"][2, 3] = value
        np.savez(path, **made)

    return write


def cut(share: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        np.savez(path, **arrays(4, 2))
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return write


def flipped(path: Path) -> None:
    np.savez(path, **arrays(4, 2))
    data = bytearray(path.read_bytes())
    data[5000] ^= 4
    path.write_bytes(data)


def in_zip(**files: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name.replace("__", "."), data)

    return write


def header_of(shape: str, descr: str = "'<f4'") -> bytes:
    """A file of NumPy's format with 16 bytes of data."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)


def misspelt(path: Path) -> None:
    """An archive whose name of an array is said to be UTF-8, and is not."""
    in_zip(Dense_é=b"")(path)
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\x80"))


class Bomb:
    """What an unpickler would run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


OBJECTS = np.array([Bomb()], dtype=object)

BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a name is missing": (without("params.Dense_3.bias"), "lacks Dense_3.bias; it holds layers up to Dense_3"),
    "a layer is missing": (without("params.Dense_0.kernel"), "lacks Dense_0.kernel"),
    "another name": (with_(step=np.zeros(3, np.float32)), "holds 'step'; expected are Dense_0.kernel"),
    "a name that climbs": (in_zip(**{"../Dense_0__kernel__npy": b""}), "holds '../Dense_0.kernel'"),
    "a name twice": (with_(Dense_1__bias=np.zeros(4, np.float32)), "holds Dense_1.bias twice"),
    "too many inputs": (with_(params__Dense_0__kernel=np.zeros((1546, 4), np.float32)), "is (1546, 4); (1545, 4) is"),
    "too few actions": (with_(params__Dense_2__kernel=np.zeros((4, 27), np.float32)), "is (4, 27); (4, 28) is needed"),
    "two values": (with_(params__Dense_3__kernel=np.zeros((4, 2), np.float32)), "is (4, 2); (4, 1) is needed"),
    "a bias of another length": (with_(params__Dense_1__bias=np.zeros(5, np.float32)), "is (5,); (4,) is needed"),
    "three axes": (with_(params__Dense_1__bias=np.zeros((1, 1, 4), np.float32)), "said to be (1, 1, 4)"),
    "a number": (with_(params__Dense_1__bias=np.float32(3)), "said to be ()"),
    "nothing in it": (with_(params__Dense_1__bias=np.zeros(0, np.float32)), "said to be (0,)"),
    "whole numbers": (with_(params__Dense_1__bias=np.zeros(4, np.int32)), "of kind int32; numbers of float16, float32"),
    "complex numbers": (with_(params__Dense_1__bias=np.zeros(4, np.complex64)), "of kind complex64"),
    "not a number": (with_one(np.nan), "Dense_1.kernel holds numbers that are not finite"),
    "infinite": (with_one(np.inf), "Dense_1.kernel holds numbers that are not finite"),
    "beyond float32": (with_(params__Dense_1__bias=np.full(4, 1e300)), "holds numbers that are not finite"),
    "no hidden layer": (lambda path: np.savez(path, **arrays(INPUTS, 0)), "holds 2 layers; a hidden one"),
    "no layers": (lambda path: np.savez(path), "holds 0 layers"),
    "cut in the middle": (cut(0.5), "is no whole .npz file"),
    "cut at the end": (cut(0.999), "is no whole .npz file"),
    "a flipped bit": (flipped, "is no whole .npz file (Bad CRC-32"),
    "empty": (lambda path: path.touch(), "is no whole .npz file"),
    "a name that is no text": (misspelt, "is no whole .npz file ('utf-8' codec"),
    "no zip": (lambda path: path.write_text("hello"), "is no whole .npz file"),
    "objects": (with_(params__Dense_1__bias=OBJECTS), "Dense_1.bias is of kind object"),
    "a bare pickle": (lambda path: path.write_bytes(pickle.dumps(Bomb())), "is no whole .npz file"),
    "a pickle inside": (in_zip(Dense_0__kernel__npy=pickle.dumps(Bomb())), "Dense_0.kernel can't be read"),
    "no magic word": (in_zip(Dense_0__kernel__npy=b"x" * 200), "Dense_0.kernel can't be read"),
    "another version": (in_zip(Dense_0__bias__npy=b"\x93NUMPY\x09\x00" + bytes(20)), "Dense_0.bias can't be read"),
    "a huge shape": (in_zip(Dense_0__bias__npy=header_of(f"({10**15},)")), "said to be (1000000000000000,)"),
    "a negative shape": (in_zip(Dense_0__bias__npy=header_of("(-2, -2)")), "said to be (-2, -2)"),
    "a header with a call": (in_zip(Dense_0__bias__npy=header_of("exit()")), "Dense_0.bias can't be read"),
    "a header of fields": (in_zip(Dense_0__bias__npy=header_of("(4,)", "[('a','<f4')]")), "Dense_0.bias is of kind"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    write, phrase = BAD[case]
    path = tmp_path / "params_40.npz"
    write(path)
    with pytest.raises(LegacyError) as caught:
        legacy_params.read(path, INPUTS, ACTIONS)
    assert str(caught.value).startswith(str(path))
    assert phrase in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_far_too_large_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "large.npz", arrays(4, 1))
    size = sum(entry.file_size for entry in zipfile.ZipFile(path).infolist())
    monkeypatch.setattr(legacy_params, "_array", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(legacy_params, "MOST_BYTES", size - 1)
    with pytest.raises(LegacyError, match=f"holds {size:,} bytes; at most {size - 1:,} are expected"):
        legacy_params.read(path, INPUTS, ACTIONS)
    path_of_pickle = pickled(tmp_path / "large.pkl", tree(arrays(4, 1)))
    with pytest.raises(LegacyError, match=f"holds .* bytes; at most {size - 1:,} are expected"):
        legacy_params.read(path_of_pickle, INPUTS, ACTIONS)
    monkeypatch.setattr(legacy_params, "MOST_ARRAYS", 5)
    with pytest.raises(LegacyError, match="holds 6 arrays; at most 5 are expected"):
        legacy_params.read(path, INPUTS, ACTIONS)


def test_a_compression_that_numpy_does_not_write_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "odd.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("Dense_0.bias.npy", header_of("(4,)"))
    with pytest.raises(LegacyError, match=r"Dense_0\.bias\.npy is compressed as no NumPy does"):
        legacy_params.read(tmp_path / "odd.npz", INPUTS, ACTIONS)


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("cut.npz", "cut.npz is no whole .npz file"),
        ("checkpoint_40.pkl", "it asks for builtins.exec, which no parameters need and which is never run; give the"),
        ("nowhere.npz", "nowhere.npz: No such file or directory"),
        (".", "holds no params_STEP.npz and no final_params.npz"),
    ],
)
def test_the_command_says_it_in_one_line(
    name: str, phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cut(0.5)(tmp_path / "cut.npz")
    (tmp_path / "checkpoint_40.pkl").write_bytes(pickle.dumps(Bomb()))
    jax.devices()
    assert main.main(["play", "hackmatrix", "--params", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("longhaul: error: ") and err.count("\n") == 1
    assert phrase in err
