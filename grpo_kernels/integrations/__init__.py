"""Our ops in other trainers: a module per host."""
