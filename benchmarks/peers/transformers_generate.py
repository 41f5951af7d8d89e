"""transformers' `generate` for benchmarks/decoding.py: completions of given lengths, wave by wave, on one core."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

torch.set_num_threads(1)
asked = json.loads(Path(sys.argv[1]).read_text())
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
END = 0


class Lengths(LogitsProcessor):
    """The end is certain at each row's length, and impossible before."""

    def __init__(self, lengths: torch.Tensor, prompt: int) -> None:
        self.lengths, self.prompt = lengths, prompt

    def __call__(self, token: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        due = token.shape[1] - self.prompt + 1 >= self.lengths
        scores[:, END] = torch.where(due, 1e9, -1e9)
        return scores


seconds = 0.0
prompts = torch.tensor(asked["prompts"]).repeat_interleave(asked["group"], 0)
lengths = torch.tensor(asked["lengths"])
for first in range(0, len(lengths), asked["rows"]):
    some, most = prompts[first : first + asked["rows"]], lengths[first : first + asked["rows"]]
    began = time.process_time()
    with torch.inference_mode():
        made = model.generate(
            some, attention_mask=torch.ones_like(some), max_new_tokens=int(lengths.max()), do_sample=True, top_k=0,
            eos_token_id=END, pad_token_id=END, use_cache=True,
            logits_processor=LogitsProcessorList([Lengths(most, some.shape[1])]),
        )  # fmt: skip
    seconds += time.process_time() - began
    assert ((made[:, some.shape[1] :] != END).sum(1) + 1 == most).all()
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"cpu_seconds": seconds, "versions": versions}))
