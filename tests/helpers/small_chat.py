"""A folder of Hugging Face's files with a random model of the characters of text, and a chat template."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from longhaul.reasoning import huggingface
from longhaul.reasoning.config import ModelConfig
from tests.helpers.quick import language_model

MARKS = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
CONFIG = ModelConfig(family="llama", width=32, heads=2, kv_heads=1, head_dim=16, hidden=48, pad=-1)


def write(folder: Path, template: str | None = TEMPLATE) -> ModelConfig:
    """Writes the folder; -> the model's config."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*MARKS, *alphabet])}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    config = dataclasses.replace(CONFIG, vocabulary=len(words))
    huggingface.save(folder, config, language_model(config))
    made.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    about = {"eos_token": "<|end|>", "bos_token": {"content": "<|start|>"}} | (
        {} if template is None else {"chat_template": template}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return config
