"""Our ops in other trainers: a module per host, which is not imported before it is enabled."""
