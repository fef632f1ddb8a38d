"""The adapter for vLLM, shown on a GPU with real vLLM: numbers, kernels, times. Nothing here is imported elsewhere."""
