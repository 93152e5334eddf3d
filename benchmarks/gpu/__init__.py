"""What ``make gpu`` asks a GPU: checks and measurements, which ``run.sh`` runs in its order."""
