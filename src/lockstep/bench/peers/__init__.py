"""Programs that run what others make, on the same weights and tokens, in environments of their own."""
