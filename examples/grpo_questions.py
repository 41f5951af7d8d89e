"""GRPO on one's own questions: a JSONL file, a verifier, a small model. Run: python examples/grpo_questions.py

The model of bytes begins with random weights and learns from the verifier's rewards alone. `taught=60` lets it imitate
the file's answers first; with `model_folder=` a model in Hugging Face's files takes its place.
"""

import json
import re
from pathlib import Path

import longhaul


def verify(problem, completion):
    """Reward of a completion: 1 where its last number is large enough, and there are many such."""
    numbers = re.findall("[0-9]+", completion)
    return float(bool(numbers) and int(numbers[-1]) >= int(problem.answer))


def write(path):
    """Questions with an answer each; the result stands after ####, as in GSM8K."""
    rows = [{"question": f"More than {n}: ", "answer": f"#### {n + 1}"} for n in range(96)]
    path.write_text("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    questions = Path("questions.jsonl")
    write(questions)
    result = longhaul.train(
        "reasoning-questions", questions=str(questions), check="grpo_questions:verify",
        num_envs=16, num_steps=8, group=8, lr=1e-3, total_steps=100 * 16 * 8 * 8,
        evaluation_episodes=16,  # questions that it never trains on
    )  # fmt: skip
    print("untrained", result.evaluation["untrained"])
    print("trained", result.evaluation["trained"])
