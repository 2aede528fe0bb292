"""Compile times and step times of the levels, beside `torch.compile` of the same shape in
`transformers`, and MindSpore.

`measure.py` makes the report; `side.py` is one measurement in a process of its own.
"""
