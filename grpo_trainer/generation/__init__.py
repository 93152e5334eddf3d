"""TRL's place for the client of a vLLM server; the client is in ``vllm``."""
