"""Models and tokenisers as Hugging Face keeps them: config.json, *.safetensors, tokenizer.json; no torch.

Read: one file or several with an index (model.safetensors.index.json), float32, float16 or bfloat16, tied embeddings or
not, rope scaling as transformers 4 and 5 write it. What a model here can't be (a sliding window, biases elsewhere,
experts, another rope) is refused by name, before any weight is read. Written: the same files, which transformers reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning.config import FAMILIES, ModelConfig, RopeScaling
from longhaul.reasoning.tokenizer import Tokeniser, cut
from longhaul.reasoning.transformer import check, shapes
from longhaul.types import Params

SHARD_BYTES = 5_000_000_000
"""Most bytes of one file, about, where a model is written."""

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"

LAYER = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "narrow": "mlp.down_proj.weight",
}
"""Our name of a layer's array -> theirs; their kernels are [outputs, inputs]."""

WHOLE = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "unembedding": "lm_head.weight"}

DTYPES = {name: np.dtype(getattr(jnp, name)) for name in ("float32", "float16", "bfloat16")}


class HubError(ValueError):
    """Files that are no model which can be read; the message is one line."""


# ------------------------------------------------------------------------------------------------------ config.json


def config_of(told: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json tells of. Raises HubError for one that can't be."""
    family = told.get("model_type")
    if family not in FAMILIES:
        raise HubError(f"model_type is {family!r}; it must be one of {', '.join(FAMILIES)}")
    refused = {
        "attention_bias": family != "qwen2" and told.get("attention_bias"),
        "mlp_bias": told.get("mlp_bias"),
        "use_sliding_window": told.get("use_sliding_window"),
        "hidden_act": told.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": told.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": told.get("quantization_config"),
    }
    for name, odd in refused.items():
        if odd:
            raise HubError(f"{name} is {told[name]!r}; models with it can't be read")
    try:
        heads = told["num_attention_heads"]
        theta, scaling = _rope(told)
        config = ModelConfig(
            family=family, vocabulary=told["vocab_size"], width=told["hidden_size"], layers=told["num_hidden_layers"],
            heads=heads, kv_heads=told.get("num_key_value_heads") or heads,
            head_dim=told.get("head_dim") or (128 if family == "qwen3" else told["hidden_size"] // heads),
            hidden=told["intermediate_size"], eps=told.get("rms_norm_eps", 1e-6), theta=theta, rope_scaling=scaling,
            tied=told.get("tie_word_embeddings", False), context=told.get("max_position_embeddings", 4096),
        )  # fmt: skip
        check(config)
    except KeyError as error:
        raise HubError(f"config.json has no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise HubError(f"config.json: {error}") from error
    return config


def config(folder: Path | str) -> ModelConfig:
    """The model that a folder's config.json tells of. Raises HubError where there is none, or one that can't be."""
    path = Path(folder) / "config.json"
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: {error}; give a folder with config.json and *.safetensors") from error
    return config_of(told)


def _rope(told: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling): transformers 5 has both in `rope_parameters`, 4 in `rope_theta` and `rope_scaling`."""
    rope = told.get("rope_parameters") or told.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or told.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if kind != "llama3":
        raise HubError(f"rope type is {kind!r}; it must be default, linear or llama3")
    return theta, RopeScaling(
        "llama3", float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )  # fmt: skip


def told_of(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a model."""
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.family]
    told: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    if config.family != "qwen2":
        told["attention_bias"] = False
    scaling = config.rope_scaling
    if scaling is not None:
        told["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        told["rope_scaling"] |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original,
        }
    return told


# ---------------------------------------------------------------------------------------------------------- weights


class _Place(NamedTuple):
    """Where one of their arrays goes."""

    path: tuple[str, ...]  # ours
    layer: int | None
    turned: bool  # theirs is ours transposed


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Their name -> our place, of all arrays of a model."""
    ours = shapes(config)
    found = {WHOLE[name]: _Place((name,), None, name == "unembedding") for name in ours if name != "layers"}
    for name, shape in ours["layers"].items():
        for layer in range(config.layers):
            place = _Place(("layers", name), layer, len(shape) == 3)
            found[f"model.layers.{layer}.{LAYER[name]}"] = place
    return found


def load(folder: Path | str, dtype: str = "float32") -> tuple[ModelConfig, Params]:
    """The model of a folder: (config, parameters as NumPy arrays of `dtype`). Raises HubError naming file and fault."""
    folder, told = Path(folder), config(folder)
    places, target = _places(told), _dtype(dtype)
    params: dict[str, Any] = jax.tree.map(
        lambda shape: np.empty(shape, target), shapes(told), is_leaf=lambda x: isinstance(x, tuple)
    )
    missing = dict.fromkeys(places)
    for name, array in _arrays(folder):
        if name not in places:
            if name == WHOLE["unembedding"] or name.endswith("rotary_emb.inv_freq"):
                continue  # the tied embedding a second time; what positions are computed from
            raise HubError(f"{folder}: {name} has no place in a {told.family} model; the files don't fit config.json")
        path, layer, turned = places[name]
        target_array = params[path[0]] if len(path) == 1 else params[path[0]][path[1]]
        into = target_array if layer is None else target_array[layer]
        array = array.T if turned else array
        if array.shape != into.shape:
            raise HubError(f"{folder}: {name} has shape {array.shape}, and config.json asks for {into.shape}")
        into[...] = array
        del missing[name]
    if missing:
        raise HubError(f"{folder}: {len(missing)} arrays are missing, {next(iter(missing))} the first")
    return told, params


def _dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _arrays(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of all files of a model, one array at a time."""
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = [ONE]
    for file in files:
        try:
            with safe_open(folder / file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise HubError(f"{folder / file}: {error}") from error


def exported(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """The parameters by Hugging Face's names and in its shapes, in the order of layers: views of the host's copy."""
    host = jax.tree.map(np.asarray, params)
    found = {}
    for name, (path, layer, turned) in _places(config).items():
        leaf = host[path[0]] if len(path) == 1 else host[path[0]][path[1]]
        array = leaf if layer is None else leaf[layer]
        found[name] = array.T if turned else array
    return {name: found[name] for name in sorted(found, key=_place_in_model)}


def _place_in_model(name: str) -> tuple[int, int]:
    """Embedding, layer by layer, the rest; a layer's tensors as they come."""
    words = name.split(".")
    return (1, int(words[2])) if words[1] == "layers" else (0 if name == WHOLE["embedding"] else 2, 0)


def imported(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Params:
    """The inverse of `exported`: new arrays. HubError where one is missing or of another shape."""
    first = next(iter(tensors.values()), np.zeros(0, np.float32))
    params: dict[str, Any] = jax.tree.map(
        lambda shape: np.empty(shape, first.dtype), shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    for name, (path, layer, turned) in _places(config).items():
        into = params[path[0]] if len(path) == 1 else params[path[0]][path[1]]
        into = into if layer is None else into[layer]
        array = tensors.get(name)
        if array is None or (array.T if turned else array).shape != into.shape:
            there = "missing" if array is None else f"of shape {array.shape}"
            raise HubError(f"{name} is {there}, and a {config.family} model of this config has it as {into.shape}")
        into[...] = array.T if turned else array
    return params


def config_text(config: ModelConfig, dtype: str = "bfloat16") -> bytes:
    """config.json."""
    return (json.dumps(told_of(config, dtype), indent=2) + "\n").encode()


def save(
    folder: Path | str, config: ModelConfig, params: Params, *, dtype: str = "float32", shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes config.json and the weights, in as many files of about `shard_bytes` as they take."""
    from safetensors.numpy import save_file

    folder, target = Path(folder), _dtype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    room = shard_bytes
    for name, found in exported(config, params).items():
        array = np.ascontiguousarray(found.astype(target))
        if shards[-1] and array.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = array
        room -= array.nbytes
    (folder / "config.json").write_bytes(config_text(config, dtype))
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):  # of a model that was here before
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    about = {"format": "pt"}  # which transformers asks for
    if len(shards) == 1:
        save_file(shards[0], folder / ONE, metadata=about)
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, arrays in zip(names, shards, strict=True):
        save_file(arrays, folder / file, metadata=about)
    total = sum(array.nbytes for arrays in shards for array in arrays.values())
    weight_map = {name: file for file, arrays in zip(names, shards, strict=True) for name in arrays}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------------- tokenisers


def tokeniser(folder: Path | str) -> Tokeniser:
    """Of a model's folder, without the marks that a template adds. Raises HubError where there is none to be read.

    What ends a text is what generation_config.json says, or else config.json; () where neither does.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise HubError(f"{path} is not there; give the folder of a model with a tokenizer.json")
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise HubError(f"{path}: {error}") from error
    ends = _ends(Path(folder))
    return Tokeniser(
        inner.get_vocab_size(),
        lambda text: list(inner.encode(text, add_special_tokens=False).ids),
        lambda numbers: str(inner.decode(cut(numbers, ends), skip_special_tokens=False)),
        ends=ends,
    )


def _ends(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        try:
            told = json.loads((folder / name).read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if told is not None:
            return tuple(told) if isinstance(told, list) else (int(told),)
    return ()
