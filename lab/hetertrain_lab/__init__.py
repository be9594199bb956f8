"""A whole fleet on one machine: the demo, its example tasks and its report."""
