"""Errors of every provider on a policy's distributions, of values and of gradients, by token."""
