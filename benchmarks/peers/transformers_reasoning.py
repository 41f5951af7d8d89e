"""transformers in turn with `longhaul bench reasoning`, sampling or learning by a model of the same sizes."""

from __future__ import annotations

import os
import time

import torch
import turns
from transformers import Qwen3Config, Qwen3ForCausalLM

config = turns.about()["config"]
sizes = config["model"]
torch.set_num_threads(int(os.environ.get("NPROC", "1")))
began = time.perf_counter()
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["width"], num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"], head_dim=sizes["head_dim"],
        intermediate_size=sizes["hidden"], tie_word_embeddings=sizes["tied"], eos_token_id=None, pad_token_id=0,
        bos_token_id=None,
    )
).eval()  # fmt: skip
seed = torch.Generator().manual_seed(0)
asked = torch.randint(1, 23, (config["rows"], config["prompt"]), generator=seed)
token = torch.randint(1, 23, (config["rows"], config["length"]), generator=seed)
reward = torch.randint(0, 2, (config["rows"] // 16, 16), generator=seed).float()
worth = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
optimiser = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.98))


def train() -> None:
    logits = model(torch.cat([asked, token], 1), logits_to_keep=config["length"] + 1, use_cache=False).logits
    log_prob = logits[:, :-1].log_softmax(-1).gather(2, token[:, :, None])[:, :, 0]
    ratio = log_prob.exp()
    loss = -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.28) * worth).mean()
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def sample() -> None:
    length = config["length"]
    with torch.no_grad():
        rows = model.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=length, min_new_tokens=length, do_sample=True,
            top_k=0, use_cache=True,
        )  # fmt: skip
    assert rows.shape[1] == config["prompt"] + length


def work(number: int) -> dict[str, float]:
    for _ in range(config["calls"]):
        (train if config["what"] == "train" else sample)()
    return {}


work(0)
turns.ready(time.perf_counter() - began, ["torch", "transformers"])
turns.serve(work)
