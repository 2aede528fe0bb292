"""Memory: what a graph's values need and when, the static arena, and what is recomputed instead of kept."""
