"""Against the real vLLM package, which .ci/vllm installs; skipped where it is not."""
