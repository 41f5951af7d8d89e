"""Greedy tokens checked by transformers: a process that `benchmarks.vllm_updates` talks to in lines of JSON.

    PYTHON benchmarks/peers/vllm_reference.py FOLDER

A sequence is greedy if each token is the likeliest one after those before it, so one forward pass checks it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers import moved_weights

TIE = 1e-3
"""Difference of two logits below which rounding decides."""

ROWS = 10


class Reference:
    def __init__(self, folder: str) -> None:
        self.base = moved_weights.base(Path(folder))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        self.version = 0

    def head(self, version: int) -> torch.Tensor:
        name = moved_weights.HEAD if moved_weights.HEAD in self.base else moved_weights.EMBEDDING
        tensors = moved_weights.moved(self.base, version, name) if version else self.base
        return torch.from_numpy(tensors[name])

    def load(self, version: int) -> None:
        tensors = moved_weights.moved(self.base, version) if version else self.base
        state = self.model.state_dict()
        for name, x in tensors.items():
            state[name].copy_(torch.from_numpy(x))
        self.version = version

    def check(self, prompts: list[list[int]], tokens: list[list[int]], old: int) -> dict[str, Any]:
        """Counts of tokens that are the likeliest ones; of these, what the head of version `old` would have changed."""
        equal = ties = noticed = total = 0
        wrong: list[int] = []
        stale = self.head(old)
        for begin in range(0, len(prompts), ROWS):
            rows = [a + b for a, b in zip(prompts[begin : begin + ROWS], tokens[begin : begin + ROWS], strict=True)]
            most = max(map(len, rows))
            ids = torch.tensor([row + [0] * (most - len(row)) for row in rows])
            hidden = self.model.model(ids).last_hidden_state
            for i, row in enumerate(rows):
                first = len(prompts[begin + i])
                inner = hidden[i, first - 1 : len(row) - 1]
                logits, others = self.model.lm_head(inner), inner @ stale.T
                want = torch.tensor(row[first:])
                best = logits.max(dim=1).values
                right = logits.argmax(dim=1) == want
                near = best - logits[torch.arange(len(want)), want] < TIE
                equal, ties = equal + int(right.sum()), ties + int((~right & near).sum())
                noticed += int((others.argmax(dim=1) != want).sum())
                total += len(want)
                if not bool((right | near).all()):
                    wrong.append(begin + i)
        return {"tokens": total, "equal": equal, "near_ties": ties, "old_head_differs": noticed, "wrong": wrong}

    def tails(self, rows: list[list[int]], firsts: list[int]) -> dict[str, Any]:
        """Number of rows whose tokens from place `first` on are the likeliest ones by the version that is loaded, also
        where those before are of another version: vLLM computes a request again after new weights."""
        right = 0
        for row, first in zip(rows, firsts, strict=True):
            logits = self.model(torch.tensor([row[:-1]])).logits[0, first - 1 :]
            want = torch.tensor(row[first:])
            gap = logits.max(dim=1).values - logits[torch.arange(len(want)), want]
            right += bool((gap < TIE).all())
        return {"right": right}


def main() -> None:
    torch.set_num_threads(1)
    reference = Reference(sys.argv[1])
    calls = {"check": reference.check, "tails": reference.tails}
    with torch.no_grad():
        for line in sys.stdin:
            asked = json.loads(line)
            call = asked.pop("call")
            reply = reference.load(**asked) if call == "load" else calls[call](**asked)
            print(json.dumps(reply or {}), flush=True)


if __name__ == "__main__":
    main()
