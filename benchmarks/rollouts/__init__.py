"""Where the time of a training step goes, by the engine that generates."""
