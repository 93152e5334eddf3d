"""Time and memory of the fused head, next to eager code and other libraries on the same problem."""
