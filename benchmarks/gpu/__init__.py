"""Jobs that need a GPU: ``make gpu`` and ``make gpu-status``."""
