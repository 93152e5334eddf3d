"""The old name of what cases on ranks share."""

from tests.sharded.ranks import expect as expect
