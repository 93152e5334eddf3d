"""A step of other trainers, with their own head and with ours."""

from benchmarks.hosts.functions import WORKS as FUNCTIONS
from benchmarks.hosts.trl import WORKS as TRAINERS

WORKS = {str(work): work for work in (*TRAINERS, *FUNCTIONS)}
