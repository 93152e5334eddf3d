"""Several processes are one process: data parallel, and sharded by FSDP2 or ZeRO."""
