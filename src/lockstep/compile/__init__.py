"""The level compiler: capture to a graph, passes, levels, the compile cache, the report."""
