"""GRPO updates by TRL's GRPOTrainer, for benchmarks/reasoning_peer.py; runs in an environment with torch and trl.

    python trl_grpo.py ASKED.json MODEL UPDATES

ASKED.json has the prompts with their answers, and the sizes. TRL's defaults hold but for those, float32 and the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    asked, folder, updates = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], int(sys.argv[3])
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip().split("\n")[0] == each) for text, each in zip(completions, answer, strict=True)]

    settings = GRPOConfig(
        output_dir=asked["scratch"], use_cpu=True, bf16=False, max_steps=updates, learning_rate=1e-4, report_to="none",
        save_strategy="no", logging_steps=1, per_device_train_batch_size=asked["prompts"] * asked["group"],
        num_generations=asked["group"], max_completion_length=asked["length"], temperature=1.0,
        model_init_kwargs={"dtype": "float32"}, shuffle_dataset=False, disable_tqdm=True,
    )  # fmt: skip
    kernels = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=asked["lora"], lora_alpha=asked["lora"], target_modules=kernels) if asked["lora"] else None
    data = Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in asked["problems"]])
    trainer = GRPOTrainer(folder, reward_funcs=right, args=settings, train_dataset=data, peft_config=lora)
    trainer.train()
    print(json.dumps([row for row in trainer.state.log_history if "reward" in row]))


if __name__ == "__main__":
    main()
