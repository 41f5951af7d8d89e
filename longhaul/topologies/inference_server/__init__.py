"""Inference-server topology: actors step environments, the server computes their actions in batches."""
