"""Time and memory of the fused head beside eager code and other libraries, on the same problem."""
