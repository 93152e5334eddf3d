"""A head over several ranks, against one process and against eager torch in the same wrapping."""
