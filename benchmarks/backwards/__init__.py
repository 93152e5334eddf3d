"""What each backward of our ops costs and how exact it is, beside the other libraries."""
