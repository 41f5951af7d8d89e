"""GRPO whose completions vLLM samples, on one machine. Run: python examples/vllm_rollouts.py VLLM [FLAG ...]

VLLM is the command of a vLLM (`.venv/bin/vllm`) beside which Longhaul is installed. This starts its server with the
model, waits for it, trains `reasoning-smollm` with it, and ends it. More flags are those of `longhaul train`.
"""

import os
import subprocess
import sys
import time
import urllib.request

MODEL, PORT = "smollm2-135m", 8000  # first: longhaul fetch smollm2-135m
BACKEND = '{"backend": "longhaul"}'


def started(vllm, model=MODEL, port=PORT):
    """Server of a model, once it answers. It takes new weights because it is in development mode: keep it local."""
    command = [vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--enable-scale-out", "--weight-transfer-config", BACKEND]
    server = subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"})
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return server
        except OSError:
            time.sleep(1.0)
    raise SystemExit(f"{vllm} ended with {server.returncode}")


def train(flags, port=PORT):
    """A run one update behind: the server samples the next completions while the learner learns."""
    command = [sys.executable, "-m", "longhaul", "train", "reasoning-smollm", "--model-folder", MODEL]
    command += ["--staleness", "1", "--rollout-servers", f"http://127.0.0.1:{port}", *flags]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    server = started(sys.argv[1])
    try:
        code = train(sys.argv[2:])
    finally:
        server.terminate()
        server.wait()
    sys.exit(code)
