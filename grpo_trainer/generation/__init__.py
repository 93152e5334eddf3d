"""Where TRL has its client of a vLLM server; ours is in ``vllm``."""
