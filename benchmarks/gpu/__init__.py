"""What ``make gpu`` runs on a GPU machine: checks, measurements, benchmarks and tests, in order."""
