"""What only a GPU can answer, as a list of jobs: ``make gpu`` and ``make gpu-status``."""
