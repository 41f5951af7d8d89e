"""A pretrained model from a package index: GGUF to Hugging Face's files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import huggingface, pretrained, sampler, transformer
from longhaul.reasoning.config import ModelConfig
from tests.helpers.libraries import library
from tests.helpers.quick import language_model

gguf = library("gguf")

CONFIG = ModelConfig(
    family="llama", vocabulary=260, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=64, eps=1e-5, theta=1e5,
    context=128,
)  # fmt: skip
TEMPLATE = "{{ messages[0]['content'] }}"


def paired(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys [outputs, inputs] in GGUF's order: the pairs of a head side by side."""
    return kernel.reshape(heads, 2, -1, kernel.shape[1]).swapaxes(1, 2).reshape(kernel.shape)


def written(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Writes a random model of `CONFIG` as GGUF; -> its parameters."""
    params = jax.tree.map(np.asarray, language_model(CONFIG, 1))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.layers)
    writer.add_context_length(CONFIG.context)
    writer.add_embedding_length(CONFIG.width)
    writer.add_feed_forward_length(CONFIG.hidden)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(CONFIG.kv_heads)
    writer.add_rope_freq_base(CONFIG.theta)
    writer.add_layer_norm_rms_eps(CONFIG.eps)
    from tokenizers.pre_tokenizers import ByteLevel

    words = ["<|a|>", "<|b|>", "<|c|>", *sorted(ByteLevel.alphabet()), "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (len(words) - 3))
    writer.add_token_merges(["1 2"])
    for add, number in (
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
    ):
        add(number)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", params["embedding"])
    writer.add_tensor("output_norm.weight", params["final_norm"])
    for there, here in pretrained.LAYER.items():
        heads = {"query": CONFIG.heads, "key": CONFIG.kv_heads}.get(here)
        for layer in range(CONFIG.layers):
            x = params["layers"][here][layer].T
            x = x if heads is None else paired(x, heads)
            writer.add_tensor(f"blk.{layer}.{there}.weight", np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return params


def test_a_gguf_becomes_a_folder_of_the_same_model(tmp_path: Path) -> None:
    params = written(tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    pretrained.convert(tmp_path / "model.gguf", folder)
    config, found = huggingface.load(folder)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, found, params)
    words = huggingface.tokeniser(folder, chat=True)
    assert words.decode(words.encode("né 12<|b|>")) == "né 12<|b|>"
    assert (1 not in words.encode("<|b|>"), words.ends, words.ask("x")) == (True, (2,), words.encode("x"))
    assert len(words.encode("12")) == 2  # digits stand alone, whatever is merged
    for line in (folder / pretrained.DIGESTS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_another_architecture_is_named(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", architecture="qwen9")
    with pytest.raises(huggingface.HubError, match=r"general\.architecture is 'qwen9'; it must be llama"):
        pretrained.convert(tmp_path / "model.gguf", tmp_path / "folder")


QUESTIONS = [
    *("What is 17+25?", "Name three rivers of Europe.", "Write a haiku about the sea.", "Why is the sky blue?"),
    *("Count from 1 to 10.", "Translate 'good morning' into French.", "Who wrote Hamlet?", "2*3="),
    *("What is the capital of Japan?", "Explain a loop in Python with code.", "List five fruits, one a line."),
    *("How many legs has a spider?", "Tell me a joke.", "é ∑ 数学 — what are these?", "If A > B and B > C, is A > C?"),
    *("Give a synonym of 'quick'.", "  leading spaces?  ", "Summarise: cats sleep a lot.", "What year is it?"),
    "Spell 'necessary' backwards.",
]

TRANSFORMERS = """
import json, sys, numpy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, questions, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
words = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids, logits, greedy = [], [], []
for question in questions:
    asked = words.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        logits.append(model(asked).logits[0, -1].numpy())
        made = model.generate(asked, max_new_tokens=64, do_sample=False, pad_token_id=2)
    ids.append(asked[0].tolist())
    greedy.append((made[0, asked.shape[1]:].tolist() + [-1] * 64)[:64])
numpy.savez(out, logits=numpy.array(logits), greedy=numpy.array(greedy), ids=json.dumps(ids))
"""


@pytest.mark.slow
def test_smollm2_is_that_of_transformers(tmp_path: Path) -> None:
    """$TRANSFORMERS_PYTHON is a Python with torch and transformers; the wheel is downloaded."""
    python = os.environ.get("TRANSFORMERS_PYTHON")
    if not python:
        pytest.skip("$TRANSFORMERS_PYTHON is not set")
    folder, result = tmp_path / "smollm2", tmp_path / "known.npz"
    pretrained.fetch("smollm2-135m", folder)
    subprocess.run([python, "-c", TRANSFORMERS, str(folder), json.dumps(QUESTIONS), str(result)], check=True)
    known = np.load(result)
    config, params = huggingface.load(folder)
    config = dataclasses.replace(config, pad=-1)
    words = huggingface.tokeniser(folder, chat=True)
    asked = [words.ask(question) for question in QUESTIONS]
    assert asked == json.loads(str(known["ids"]))
    room = max(map(len, asked))
    prompts = jnp.array([[-1] * (room - len(each)) + each for each in asked], jnp.int32)
    hidden = jax.jit(lambda p: transformer.trunk(config, p, prompts, prompts != -1)[0][:, -1])(params)
    logits = transformer.unembed(config, params, hidden)
    assert np.abs(logits - known["logits"]).max() < 2e-4 * np.abs(known["logits"]).max()
    sample = jax.jit(sampler.sampler(config, sampler.Sampling(64, 1, 0.0), tokeniser=words))
    drawn = sample(params, prompts, jax.random.split(jax.random.key(0), len(prompts)), jnp.int32(sampler.UNBOUNDED))
    np.testing.assert_array_equal(drawn.token, known["greedy"])
