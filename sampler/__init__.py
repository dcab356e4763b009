"""The sampling engine: continuous batching over a paged KV cache, CUDA graphs, sampling a token."""
