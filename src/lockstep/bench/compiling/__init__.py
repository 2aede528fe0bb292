"""Compile times and step times of the levels, beside `torch.compile` on the same shape of `transformers`.

`measure.py` makes the report; `side.py` is one measurement in a process of its own.
"""
