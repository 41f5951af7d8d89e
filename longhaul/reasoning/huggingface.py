"""Models and tokenisers in Hugging Face's files: config.json, *.safetensors, tokenizer.json; without torch.

Reading supports one file or several with an index (model.safetensors.index.json), float32, float16 or bfloat16, tied
embeddings or not, rope scaling of transformers 4 and 5. Unsupported properties (a sliding window, other biases,
experts, another rope) are refused by name before any weight is read. Written files can be read by transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import chat_template, tokenizer_file
from longhaul.reasoning.config import FAMILIES, ModelConfig, RopeScaling
from longhaul.reasoning.tokenizer import Tokeniser, cut
from longhaul.reasoning.transformer import ADAPTED, ALPHA, check, merged, shapes, size
from longhaul.runtime import bounded_json, worker_pool
from longhaul.runtime.errors import first_line
from longhaul.runtime.files import apply_umask
from longhaul.types import Params

SHARD_BYTES = 5_000_000_000
"""Approximate size of a written file in bytes."""

MOST_JSON = 64 << 20
"""Bytes of memory of a config.json or an index; an index of a hundred thousand arrays takes a third of it."""

MOST_TEMPLATE = 1 << 20
"""Bytes of a chat template; the longest known ones have some 20 kB."""

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
"""Names of a layer's arrays here -> in Hugging Face's files, whose kernels are [outputs, inputs]."""

WHOLE = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "unembedding": "lm_head.weight"}

DTYPES = {name: np.dtype(getattr(jnp, name)) for name in ("float32", "float16", "bfloat16")}

COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Fields of a config.json that are counts, and that each has."""


class HubError(ValueError):
    """Error of files that hold no readable model; the message is one line."""


# ------------------------------------------------------------------------------------------------------ config.json


def config_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Architecture in a config.json. Raises HubError for an unsupported one."""
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise HubError(f"model_type is {family!r}; it must be one of {', '.join(FAMILIES)}")
    refused = {
        "attention_bias": family != "qwen2" and fields.get("attention_bias"),
        "mlp_bias": fields.get("mlp_bias"),
        "use_sliding_window": fields.get("use_sliding_window"),
        "hidden_act": fields.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": fields.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": fields.get("quantization_config"),
    }
    for name, odd in refused.items():
        if odd:
            raise HubError(f"{name} is {fields[name]!r}; models with it are not supported; choose another model")
    for name in COUNTS:
        if name in fields and not (type(fields[name]) is int and 0 < fields[name] < 1 << 31):
            raise HubError(f"{name} is {fields[name]!r:.80}; it must be a whole number, 1 or more")
    try:
        heads = fields["num_attention_heads"]
        theta, scaling = _rope(fields)
        config = ModelConfig(
            family=family, vocabulary=fields["vocab_size"], width=fields["hidden_size"],
            layers=fields["num_hidden_layers"], heads=heads, kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or (128 if family == "qwen3" else fields["hidden_size"] // heads),
            hidden=fields["intermediate_size"], eps=fields.get("rms_norm_eps", 1e-6), theta=theta, rope_scaling=scaling,
            tied=fields.get("tie_word_embeddings", False), context=fields.get("max_position_embeddings", 4096),
        )  # fmt: skip
        check(config)
    except KeyError as error:
        raise HubError(f"{error.args[0]} is missing; fetch the model again") from error
    except (TypeError, ValueError) as error:
        raise HubError(f"{error}; fetch the model again, or choose another") from error
    return config


def architecture(path: Path) -> ModelConfig:
    """Architecture in a config.json, whatever lies beside it. Raises HubError, with the path."""
    try:
        return config_of(bounded_json.read(path, MOST_JSON))
    except HubError as error:
        raise HubError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise HubError(f"{path} is not there; give a folder with config.json and *.safetensors") from error
    except (OSError, ValueError) as error:
        raise HubError(f"{error}; give a folder with config.json and *.safetensors") from error


def config(folder: Path | str) -> ModelConfig:
    """Architecture of a folder's model. Raises HubError where a file is not there, or for an unsupported model."""
    path = Path(folder) / "config.json"
    model = architecture(path)
    for file in _files(path.parent):
        if not (path.parent / file).is_file():
            raise HubError(f"{path.parent / file} is not there; give a folder with config.json and *.safetensors")
    stored = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
    if (count := size(model)) > stored:  # a number takes a byte or more
        raise HubError(
            f"{path} asks for {count:,} parameters, and the *.safetensors beside it have {stored:,} bytes; fetch "
            "the model again"
        )
    return model


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: transformers 5 has both in `rope_parameters`, 4 in `rope_theta` and `rope_scaling`."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_scaling is {rope!r:.80}, and no object")
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
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


def fields_of(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Content of a model's config.json."""
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.family]
    fields: dict[str, Any] = {
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
        fields["attention_bias"] = False
    scaling = config.rope_scaling
    if scaling is not None:
        fields["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            fields["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original,
            }
    return fields


# ---------------------------------------------------------------------------------------------------------- weights


def _views(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Arrays of the parameters by Hugging Face's names and in its shapes, in the order of layers."""
    views = {WHOLE["embedding"]: params["embedding"]}
    for layer in range(config.layers):
        for name in shapes(config)["layers"]:
            views[f"model.layers.{layer}.{LAYER[name]}"] = params["layers"][name][layer].T
    views[WHOLE["final_norm"]] = params["final_norm"]
    return views if config.tied else views | {WHOLE["unembedding"]: params["unembedding"].T}


def load(folder: Path | str, dtype: str = "float32") -> tuple[ModelConfig, Params]:
    """Model of a folder: (config, parameters as NumPy arrays of `dtype`). Raises HubError with file and fault."""
    folder, model = Path(folder), config(folder)
    return model, imported(model, _arrays(folder), str(folder), dtype)


def imported(
    model: ModelConfig, arrays: Iterable[tuple[str, np.ndarray]], where: str, dtype: str = "float32"
) -> Params:
    """Parameters as NumPy arrays of `dtype` from pairs (Hugging Face's name, array), copied.

    Raises HubError, which names `where` they are from, for an array that has no place, is missing or of another shape.
    """
    target = _dtype(dtype)
    params: dict[str, Any] = jax.tree.map(
        lambda shape: np.empty(shape, target), shapes(model), is_leaf=lambda x: isinstance(x, tuple)
    )
    views = _views(model, params)
    missing = dict.fromkeys(views)
    for name, array in arrays:
        if name not in views:
            if name == WHOLE["unembedding"] or name.endswith("rotary_emb.inv_freq"):
                continue  # a copy of the tied embedding; frequencies that are computed here
            raise HubError(
                f"{where}: {name} has no place in a {model.family} model: the files don't fit config.json; fetch "
                "the model again"
            )
        if array.shape != views[name].shape:
            raise HubError(
                f"{where}: {name} has shape {array.shape}, and config.json asks for {views[name].shape}; fetch the "
                "model again"
            )
        views[name][...] = array
        del missing[name]
    if missing:
        raise HubError(
            f"{where}: {len(missing)} arrays are missing, {next(iter(missing))} the first; fetch the model again"
        )
    return params


def _dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _arrays(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Pairs (name, array) of all files of a model, one array at a time."""
    from safetensors import SafetensorError, safe_open

    for file in _files(folder):
        try:
            bounded_json.check_safetensors(folder / file)
            with safe_open(folder / file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    yield name, opened.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise HubError(f"{folder / file}: {error}; fetch it again") from error


def _files(folder: Path) -> list[str]:
    return sorted(set(_weight_map(folder).values())) if (folder / INDEX).exists() else [ONE]


def _weight_map(folder: Path) -> dict[str, str]:
    """File of each array, by the index of a model in several files."""
    try:
        weight_map = bounded_json.read(folder / INDEX, MOST_JSON)["weight_map"]
    except KeyError as error:
        raise HubError(f"{folder / INDEX} has no weight_map; fetch it again") from error
    except (OSError, ValueError) as error:
        raise HubError(f"{error}; fetch it again") from error
    names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise HubError(f"{folder / INDEX}: weight_map is not a file's name for each array; fetch it again")
    return weight_map


def exported(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Parameters by Hugging Face's names and in its shapes, in the order of layers: views of the host's copy."""
    whole = {**params, "layers": merged(config, params["layers"])}
    return _views(dataclasses.replace(config, lora=0), jax.tree.map(np.asarray, whole))


WORDS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files that say how a model reads and ends a text."""


def beside(config: ModelConfig, source: Path | str | None = None, dtype: str = "float32") -> dict[str, bytes]:
    """Files of a model's folder beside its weights: config.json, and the `source`'s tokeniser, chat template and marks
    that begin and end a text."""
    fields, files = fields_of(config, dtype), {}
    if source is not None:
        files = {name: (Path(source) / name).read_bytes() for name in WORDS if (Path(source) / name).exists()}
        known = bounded_json.read(Path(source) / "config.json", MOST_JSON)
        fields |= {name: known[name] for name in known if name.endswith("_token_id")}
    return {"config.json": (json.dumps(fields, indent=2) + "\n").encode(), **files}


def save(
    folder: Path | str,
    config: ModelConfig,
    params: Params,
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    source: Path | str | None = None,
) -> None:
    """Folder of config.json and the weights, in files of about `shard_bytes`; LoRA's factors are merged.

    The tokeniser, the chat template and the tokens that begin and end a text are copied from the model at `source`.
    """
    from safetensors.numpy import save_file

    folder, target = Path(folder), _dtype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    room = shard_bytes
    for name, value in exported(config, params).items():
        array = np.ascontiguousarray(value.astype(target))
        if shards[-1] and array.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = array
        room -= array.nbytes
    for name, text in beside(config, source, dtype).items():
        (folder / name).write_bytes(text)
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):  # files of an earlier model
        old.unlink(missing_ok=True)
    about = {"format": "pt"}  # required by transformers
    if len(shards) == 1:
        save_file(shards[0], folder / ONE, metadata=about)
        apply_umask(folder / ONE)
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, arrays in zip(names, shards, strict=True):
        save_file(arrays, folder / file, metadata=about)
        apply_umask(folder / file)
    total = sum(array.nbytes for arrays in shards for array in arrays.values())
    weight_map = {name: file for file, arrays in zip(names, shards, strict=True) for name in arrays}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def digest(folder: Path | str) -> str:
    """SHA-256 of the names and bytes of a model's files of weights."""
    combined = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            combined.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return combined.hexdigest()


ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of adapters as PEFT (Mangrulkar et al. 2022) reads them."""


def save_adapters(folder: Path | str, config: ModelConfig, params: Params, *, base: str) -> None:
    """Folder of LoRA's factors alone, for the model at `base`, as PEFT loads them."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for layer in range(config.layers):
        for name in ADAPTED:
            place = f"base_model.model.model.layers.{layer}.{LAYER[name].removesuffix('.weight')}"
            for part, letter in (("down", "A"), ("up", "B")):
                kernel = np.asarray(params["layers"][f"{name}_{part}"][layer], np.float32)
                arrays[f"{place}.lora_{letter}.weight"] = np.ascontiguousarray(kernel.T)
    save_file(arrays, folder / ADAPTER, metadata={"format": "pt"})
    apply_umask(folder / ADAPTER)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [LAYER[name].split(".")[1] for name in ADAPTED],
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------------- tokenisers


def tokeniser(folder: Path | str, *, chat: bool = False, system: str = "") -> Tokeniser:
    """Tokeniser of a model's folder. Raises HubError where none can be read.

    With `chat` a question stands in the model's chat template, after `system`, if any. A text never gives a special
    token: where it is spelt like one, it is read letter by letter. The tokens that end a text are those of
    generation_config.json, else of config.json, else ().
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise HubError(f"{path} is not there; give the folder of a model with a tokenizer.json")
    try:
        tokenizer_file.check(path)
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise HubError(str(error) if str(path) in str(error) else f"{path}: {error}; fetch it again") from error
    marked = Tokenizer.from_str(inner.to_str())
    inner.encode_special_tokens = True  # as text
    ends = _ends(Path(folder))

    def numbers_of(text: str, tokenizer: Any) -> list[int]:
        try:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        except TypeError:
            raise ValueError(f"{text!r:.40} has half of a character, a lone surrogate") from None
        except BaseException as error:  # a panic of Rust, where a regular expression gives up
            if type(error).__name__ != "PanicException":
                raise
            raise HubError(f"{path} can't read {text!r:.40}: {first_line(error)}") from None

    encode, with_marks = (functools.partial(numbers_of, tokenizer=by) for by in (inner, marked))
    count = 1 + max(inner.get_vocab().values(), default=-1)
    end = _template(Path(folder))[1].get("eos_token")
    for word, odd in (*((number, number >= count) for number in ends),
                      (end, end is not None and inner.token_to_id(end) is None)):  # fmt: skip
        if odd:
            raise HubError(f"{path} has no token {word!r}, which ends a text of this model; they must be of one model")
    special = [token.content for token in marked.get_added_tokens_decoder().values() if token.special]
    return Tokeniser(
        count,
        encode,
        lambda numbers: str(inner.decode(cut(numbers, ends), skip_special_tokens=False)),
        ends=ends,
        chat=_chat(Path(folder), system, encode, with_marks, special) if chat else None,
    )


HERE = "\ue000"
"""Stands for a text that spells a special token, while the template is filled in; of Unicode's private use."""

Conversation = Callable[[Sequence[Mapping[str, str]]], list[int]]
"""Function of turns, {"role": ..., "content": ...} each, to the numbers of a text that the model is to continue."""


def conversation(folder: Path | str) -> Conversation:
    """Chat template of a model's folder. Raises HubError where there is none; so does the function where it fails.

    Of a turn that spells a special token, the content is read letter by letter.
    """
    from tokenizers import Tokenizer

    words, path = tokeniser(folder), Path(folder) / "tokenizer.json"
    marked = Tokenizer.from_file(str(path))
    special = [token.content for token in marked.get_added_tokens_decoder().values() if token.special]

    def with_marks(text: str) -> list[int]:
        return list(marked.encode(text, add_special_tokens=False).ids)

    return _conversation(Path(folder), words.encode, with_marks, special)


def _conversation(
    folder: Path,
    encode: Callable[[str], list[int]],
    with_marks: Callable[[str], list[int]],
    special: Sequence[str],
) -> Conversation:
    source, names = _template(folder)
    if not isinstance(source, str):
        raise HubError(f"{folder} has no chat template")
    apart = worker_pool.pool(1)

    def filled(turns: list[dict[str, str]]) -> str:
        nonlocal apart
        try:
            return apart.submit(chat_template.fill, source, names, turns).result()
        except (ValueError, BrokenProcessPool) as error:
            if isinstance(error, BrokenProcessPool):  # the next conversation has another process
                apart = worker_pool.pool(1)
            raise HubError(
                f"{folder}: the chat template fails: {' '.join(str(error).split())}; "
                "correct the template, or do without chat"
            ) from error

    def ask(turns: Sequence[Mapping[str, str]]) -> list[int]:
        odd = [turn["content"] for turn in turns if any(word in turn["content"] for word in (*special, HERE))]
        if not odd:
            return with_marks(filled([dict(turn) for turn in turns]))
        hidden = [{**turn, "content": HERE} if turn["content"] in odd else dict(turn) for turn in turns]
        first, *rest = map(with_marks, filled(hidden).split(HERE))
        if len(rest) != len(odd):
            raise HubError(
                f"{folder}: the chat template leaves out the question; correct the template, or do without chat"
            )
        return first + [number for text, part in zip(odd, rest, strict=True) for number in encode(text) + part]

    weakref.finalize(ask, lambda: apart.shutdown())  # before the modules of the pool are gone
    return ask


def _chat(
    folder: Path,
    system: str,
    encode: Callable[[str], list[int]],
    with_marks: Callable[[str], list[int]],
    special: Sequence[str],
) -> Callable[[str], list[int]]:
    """Function of a question to the numbers of a conversation that the model is to continue."""
    before = [{"role": "system", "content": system}] if system else []

    def ask(question: str) -> list[int]:
        return whole([*before, {"role": "user", "content": question}])

    try:
        whole = _conversation(folder, encode, with_marks, special)
        ask(HERE)  # so that a template without a place for the question is refused
    except HubError as error:
        raise HubError(f"{error}; leave --chat out, or put a template that works into tokenizer_config.json") from error
    return ask


def _template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """(source of a chat template, if any, names in it: the marks that begin and end a text)."""
    path = folder / "tokenizer_config.json"
    try:
        fields = bounded_json.read(path, MOST_JSON) if path.exists() else {}
        apart = folder / "chat_template.jinja"
        if apart.exists() and (length := apart.stat().st_size) > MOST_TEMPLATE:
            path = apart
            raise ValueError(f"it has {length:,} bytes; a chat template has at most {MOST_TEMPLATE:,}")
        source = apart.read_text(encoding="utf-8") if apart.exists() else fields.get("chat_template")
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: {error}") from error
    if isinstance(source, list):  # several, by name
        known = [each for each in source if isinstance(each, dict) and each.get("name") == "default"]
        source = known[0].get("template") if known else None
    names = {name: fields.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    plain = {name: each.get("content") if isinstance(each, dict) else each for name, each in names.items()}
    return source, {name: each for name, each in plain.items() if isinstance(each, str)}


def _ends(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        try:
            ends = bounded_json.read(folder / name, MOST_JSON).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise HubError(f"{error}; fetch it again") from error
        if ends is not None:
            numbers = tuple(ends) if isinstance(ends, list) else (ends,)
            if not all(type(each) is int for each in numbers):
                raise HubError(f"{folder / name}: eos_token_id is {ends!r:.80}; it must be a number, or a list of them")
            return numbers
    return ()
