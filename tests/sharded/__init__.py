"""Tests on real ranks: several processes over gloo."""
