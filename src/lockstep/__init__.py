"""Lockstep: train and serve large language models with the same bits on every path."""
